"""Habits of plain PyTorch scripts.

They train as they would without the agent, and are measured where that is possible.
"""

from __future__ import annotations

import math
import os
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pollux import Job, attach
from pollux.goodput import NoiseScale
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import EXAMPLES, attached, data, network, update

SGD = torch.optim.SGD


def flat_gradient(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.to_dense().flatten() for p in model.parameters() if p.grad is not None])


# -- an own loop ----------------------------------------------------------------------------------------------


def test_the_first_step_of_a_loop_without_micro_batch_weighs_as_much_as_the_others() -> None:
    """Before the first pass, no one knows whether the loop has contexts.

    This matters at 8 of 32 examples per GPU.
    """
    job = attached(0.0)
    loader = job.loader(data(), 32, per_gpu=(1, 8), shuffle=False)
    passes = iter(loader)
    x, y, _ = next(passes)
    job.backward(mse_loss(job.model(x), y))
    plain = network()
    mse_loss(plain(x), y).backward()
    torch.testing.assert_close(flat_gradient(job.module), flat_gradient(plain))

    def train_on() -> None:
        for x, y, _ in passes:
            job.optimizer.step()
            job.backward(mse_loss(job.model(x), y))

    with pytest.warns(UserWarning, match="does not accumulate: per GPU 8 examples a step, not 32"):
        train_on()
    assert (job.batch_size, job.local_batch, job.accumulation) == (8, 8, 0)
    job.close()


@pytest.mark.parametrize("amp", [False, True])
def test_a_loop_that_accumulates_by_itself_is_not_taken_for_one_that_skips_steps(amp: bool) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=amp)
    job = attached(0.0, scaler=scaler)
    loader = job.loader(data(), 16)
    passes = 0
    for _ in job.epochs(2, statistical=True):
        for x, y, _ in loader:
            passes += 1
            scaler.scale(mse_loss(job.model(x), y) / 4).backward()
            if passes % 4 == 0:
                scaler.step(job.optimizer)
                scaler.update()
                job.optimizer.zero_grad()
    # Two passes of 13 micro-batches, to the end of a step.
    assert (passes, job.progress.optimizer_steps) == (28, 7)
    assert job.progress.samples >= 2 * EXAMPLES
    job.close()


def by_hand(own: bool, apart: bool = True) -> tuple[int, float, float]:
    """Make four passes of 4 examples per rank and step.

    `own`: the user accumulates, and not the agent. `apart`: the user's first three passes are under `no_sync`. Return
    (samples, var of one example, sqr).
    """
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
    job = attached(0.0, measuring={"every": 1, "decay": 1 - 1e-9})
    size = 8 if own else 32
    loader = job.loader(data(832), size, per_gpu=(1, 4), shuffle=False)
    for n, (x, y, _) in enumerate(micro for _ in job.epochs(2) for micro in loader):
        if not own:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
        elif n % 4 < 3 and apart:
            with job.model.no_sync():  # type: ignore[operator]
                (mse_loss(job.model(x), y) / 4).backward()
        else:
            (mse_loss(job.model(x), y) / 4).backward()
        if job.sync_gradients and n % 4 == 3:
            job.optimizer.step()
            job.optimizer.zero_grad()
    (found,) = job.training.models[0].averages.groups() or [NoiseScale(math.nan, math.nan)]
    job.close()
    return job.training.models[0].averages.samples, found.var * size, found.sqr


def test_accumulation_by_the_users_own_no_sync_is_measured_between_ranks(ranks: Any) -> None:
    for (samples, *hand), (known, *ours) in zip(
        ranks(2, by_hand, True), ranks(2, by_hand, False), strict=True
    ):
        assert samples >= known - 4
        assert hand == pytest.approx(ours, rel=0.05)
    assert [samples for samples, *_ in ranks(2, by_hand, True, False)] == [0, 0], (
        "reduced pass by pass, `.grad` does not hold the ranks' own gradients"
    )


# -- a graph that stays ---------------------------------------------------------------------------------------


def gradients(static: bool) -> list[Tensor]:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.01)
    job = attach(
        model, optimizer, adaptive=False, measuring={"every": 1}, ddp_kwargs={"static_graph": static}
    )
    found = []
    for x, y, _ in job.loader(data(), 32, per_gpu=(1, 4), shuffle=False):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y))
        if job.sync_gradients:
            found.append(flat_gradient(model).clone())
            optimizer.step()
            optimizer.zero_grad()
    samples = job.training.models[0].averages.samples
    job.close()
    assert static == (samples == 0), (
        "reduced several times a step, it does not say what one rank's gradient was"
    )
    return found


def test_a_static_graph_accumulates(ranks: Any) -> None:
    """The agent accumulates where torch's own `no_sync` fails.

    With a static graph, torch ends in one of its own assertions at the first step.
    """
    for plain, static in zip(ranks(2, gradients, False), ranks(2, gradients, True), strict=True):
        assert len(static) == 7
        for a, b in zip(plain, static, strict=True):
            torch.testing.assert_close(a, b)


# -- gradients of other kinds ---------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(EXAMPLES, 6, sparse=True)
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.out(x + self.table(ids))
        return out


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.waves = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        out: Tensor = self.out((x * self.waves).abs())
        return out


def unlike(kind: Any, make: Any, per_gpu: tuple[int, int]) -> int:
    torch.manual_seed(0)
    model = kind()
    optimizer = make(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=False, measuring={"every": 1})
    loader = job.loader(data(), 32, per_gpu=per_gpu)
    for _ in job.epochs(3, statistical=True):
        for x, y, ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x, ids), y))
            update(job)
    job.close()
    assert job.progress.samples == 3 * EXAMPLES
    return job.training.models[0].averages.samples


@pytest.mark.parametrize(("kind", "make"), [(Lookup, SGD), (Waves, torch.optim.Adam)])
def test_sparse_and_complex_gradients_are_left_out_of_what_is_measured(
    ranks: Any, kind: Any, make: Any
) -> None:
    if kind is Waves and torch.__version__ < "2.13":
        pytest.skip("gloo broadcasts complex parameters from torch 2.13 on")
    assert min(ranks(2, unlike, kind, make, (1, 16))) > 0
    for per_gpu in ((32, 32), (8, 8)):
        assert unlike(kind, make, per_gpu) > 0


def test_a_model_that_calls_itself_sparse_is_measured_but_for_its_sparse_parts() -> None:
    model: Any = Lookup()
    model.sparse = True
    job = attach(model, SGD(model.parameters(), lr=0.01), adaptive=False)
    assert set(job.training.models[0].meter.norms.group_of) == set(model.out.parameters())
    job.close()


# -- passes that do not use the same parameters on all ranks ---------------------------------------------------


class Branches(nn.Module):
    """Two branches; a pass takes one, whose gradients come last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList([nn.Linear(6, 16), nn.Linear(6, 16)])
        self.out = nn.Linear(16, 1)

    def forward(self, x: Tensor, way: int) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.ways[way](x)))
        return out


def branching(make: Any) -> tuple[int, float, float]:
    """Return (samples, var, sqr) of a model whose ranks take other branches."""
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
    model = Branches()
    optimizer = make(model.parameters(), lr=0.0)
    ddp = {"find_unused_parameters": True}
    job = attach(model, optimizer, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9}, ddp_kwargs=ddp)
    loader, chosen = job.loader(data(192), 16), random.Random(job.rank)
    for x, y, _ in (batch for _ in job.epochs(4) for batch in loader):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x, chosen.randrange(2)), y))
        optimizer.step()
        optimizer.zero_grad()
    (found,) = job.training.models[0].averages.groups() or [NoiseScale(math.nan, math.nan)]
    job.close()
    return job.training.models[0].averages.samples, found.var, found.sqr


@pytest.mark.parametrize("make", [SGD, torch.optim.Adam])
def test_ranks_that_use_other_parameters_agree_on_their_samples(ranks: Any, make: Any) -> None:
    """Ranks stay together although each of them uses other parameters.

    Otherwise a rank that does not use its watched parameter has no sample, and is absent when the others read
    theirs.
    """
    found = ranks(2, branching, make)
    assert found[0] == found[1]
    assert found[0][0] >= 40, "of 48 steps"


# -- several optimizers of one model --------------------------------------------------------------------------


def scales(apart: bool, per_gpu: tuple[int, int]) -> list[tuple[float, float]]:
    """Return the noise scales of body and head.

    They belong to two optimizers (`apart`), or to two parameter groups of one optimizer.
    """
    model: Any = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizers: list[torch.optim.Optimizer] = (
        [SGD([group], lr=0.0) for group in groups] if apart else [SGD(groups, lr=0.0)]
    )
    job: Job = attach(model, optimizers[0], adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9})
    head = job.add_model("head", model[2], optimizers[1]) if apart else None
    loader = job.loader(data(), 16, per_gpu=per_gpu)
    for _ in job.epochs(3, statistical=True):
        for x, y, _ in loader:
            if head is not None:
                with job.micro_batch(), head.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
            else:
                with job.micro_batch():
                    job.backward(mse_loss(job.model(x), y))
            if job.sync_gradients:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
    found = [tuple(n) for t in job.training.models for n in t.averages.groups() or ()]
    job.close()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("most", [16, 4])
def test_two_optimizers_of_one_model_are_measured_as_two_groups_of_one(ranks: Any, most: int) -> None:
    for apart, together in zip(
        ranks(2, scales, True, (1, most)), ranks(2, scales, False, (1, most)), strict=True
    ):
        assert apart == [pytest.approx(n, rel=1e-3) for n in together]
    wanted = scales(False, (most, most))
    assert len(wanted) == 2
    assert scales(True, (most, most)) == [pytest.approx(n, rel=1e-3) for n in wanted]


# -- a loss that nobody has weighed ---------------------------------------------------------------------------


@pytest.mark.parametrize(("weighed", "per_gpu"), [(True, 8), (False, 8), (False, 32)])
def test_a_loss_without_its_weight_is_told_of(weighed: bool, per_gpu: int) -> None:
    job = attached(0.01)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for x, y, _ in job.loader(data(192), 32, per_gpu=(per_gpu, per_gpu)):
            with job.micro_batch():
                loss = mse_loss(job.model(x), y)
                job.backward(loss) if weighed else loss.backward()
            update(job)
    job.close()
    wrong = [str(one.message) for one in told if "expected job.backward(loss)" in str(one.message)]
    assert len(wrong) == (not weighed and per_gpu == 8), "once, and where it matters"
    assert all("0.25" in one and on_the_page(one) for one in wrong)


# -- gradients of other passes --------------------------------------------------------------------------------


def weights_under(attack: bool, per_gpu: tuple[int, int] | None) -> Tensor:
    job = attached(0.01)
    loader = job.loader(data(), 4, per_gpu=per_gpu, shuffle=False)
    for _ in job.epochs(1):
        for x, y, _ in loader:
            if attack:
                mse_loss(job.module(x), y).backward()
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    return torch.nn.utils.parameters_to_vector(job.module.parameters())


def test_gradients_that_an_attack_on_the_batch_leaves_are_no_part_of_a_step() -> None:
    assert weights_under(True, None).equal(weights_under(False, None))
    with pytest.warns(UserWarning, match="changed between two passes of a step"):
        weights_under(True, (1, 2))
