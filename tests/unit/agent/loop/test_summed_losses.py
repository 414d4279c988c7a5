"""Losses that are sums over tokens: a step is the mean over its tokens.

The truth comes from one process that has all examples of a step. It shares no code with the agent.
"""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import LoopMistake
from pollux.noise.noise_scale import SampleKind, unbiased
from pollux.noise.samples import added, summed
from pollux.noise.uneven import as_equal, step_weights
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import EXAMPLES, attached, data, network

pytestmark = pytest.mark.usefixtures("read_at_once")

RATE = 0.05


def tokens() -> Tensor:
    """Tokens of each example: from none to many."""
    drawn = torch.randint(0, 9, (EXAMPLES,), generator=torch.Generator().manual_seed(5)).float()
    drawn[40:44] = 0.0  # all of a rank's share
    return drawn


def summed_loss(model: nn.Module, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    return (t * (model(x) - y).square().squeeze(1)).sum()


def gradient(model: nn.Module, rows: slice) -> Tensor:
    """Gradient of the summed loss."""
    x, y, _ = data().tensors
    model.zero_grad()
    summed_loss(model, x[rows], y[rows], tokens()[rows]).backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def truth(m0: int, ranks: int, passes: int) -> tuple[list[Tensor], Tensor, list[tuple[float, float]]]:
    """Return each step's gradient, the last weights, and the noise.

    The noise is (|g|^2, tr Sigma / M0) of each whole step.
    """
    model, t = network(), tokens()
    m, seen, noise = m0 // (ranks * passes), [], []
    before: Tensor | None = None
    for start in range(0, EXAMPLES, m0):
        rows = slice(start, min(start + m0, EXAMPLES))
        step = gradient(model, rows) / float(t[rows].sum())
        seen.append(step)
        if rows.stop - start == m0:
            parts: dict[int, list[slice]] = {}
            for i in range(ranks * passes):
                parts.setdefault(i % ranks if ranks > 1 else i, []).append(
                    slice(start + i * m, start + (i + 1) * m)
                )
            sums = [sum(gradient(model, part) for part in own) for own in parts.values()]
            weights = np.array([sum(float(t[part].sum()) for part in own) for own in parts.values()])
            if len(sums) > 1:
                noise.append(_estimate(torch.stack(sums), weights))  # type: ignore[arg-type]
            elif before is None:
                before = step
            else:  # two steps, which differ by their tokens, too
                noise.append(_estimate(torch.stack([before, step]), np.ones(2), batches=2))
                before = None
        with torch.no_grad():
            at = 0
            for p in model.parameters():
                p.sub_(RATE * step[at : at + p.numel()].view(p.shape).float())
                at += p.numel()
    return seen, torch.cat([p.detach().flatten() for p in model.parameters()]), noise


def _estimate(sums: Tensor, weights: Any, batches: int = 1) -> tuple[float, float]:
    """Least biased estimates from sums of gradients; `batches` of M0 in all."""
    n, u = len(weights), weights * len(weights) / weights.sum()
    own = (sums * n / weights.sum()).numpy()
    q, local, total = (u**2).mean(), (own**2).sum(1).mean(), (own.mean(0) ** 2).sum()
    return (n * total - local) / (n - q), (local - q * total) / (n - q) * batches


def trained(m0: int, most: int, kind: str) -> tuple[list[Tensor], Tensor, tuple[float, float], int]:
    """The same, under the agent."""
    import torch.distributed as dist

    model = network()
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=kind == "amp")
    job = attach(model, optimizer, scaler=scaler, adaptive=False, measuring={"every": 1, "decay": 1 - 1e-9})
    x, y, index = data().tensors
    dataset = TensorDataset(x, y, index, tokens())
    loader = job.loader(dataset, m0, per_gpu=(1, most), shuffle=False)
    seen = []
    for x, y, _, t in loader:
        with job.micro_batch():
            job.backward(summed_loss(job.model, x, y, t), weight=t.sum() if kind == "amp" else int(t.sum()))
        if job.sync_gradients:
            scaler.unscale_(optimizer)
            seen.append(torch.cat([whole(p.grad).flatten() for p in model.parameters()]))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    averages = job.training.models[0].averages
    found = float(averages.sqr[0] / averages.weight), float(averages.var[0] / averages.weight)
    job.close()
    weights = torch.cat([whole(p.detach()).flatten() for p in model.parameters()])
    return seen, weights, found, averages.samples


def whole(tensor: Any) -> Tensor:
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


def all_trained(cases: list[tuple[int, int, str]]) -> list[Any]:
    return [trained(*case) for case in cases]


@pytest.mark.parametrize(
    ("size", "cases"),
    [
        (1, [(24, 24, "plain"), (24, 8, "amp")]),
        (3, [(24, 8, "plain"), (24, 4, "plain"), (24, 4, "amp"), (24, 4, "fsdp2")]),
    ],
)
def test_steps_and_noise_are_those_of_one_process_that_has_all_tokens(
    ranks: Any, size: int, cases: list[tuple[int, int, str]]
) -> None:
    if torch.__version__ < "2.13":
        cases = [case for case in cases if case[2] != "fsdp2"]
    for results in ranks(size, all_trained, cases):
        for (m0, most, kind), (seen, weights, noise, samples) in zip(cases, results, strict=True):
            wanted, last, told = truth(m0, size, m0 // (size * most))
            assert len(seen) == len(wanted) == 9, kind
            for a, b in zip(seen, wanted, strict=True):
                torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-5, msg=kind)
            torch.testing.assert_close(weights, last, rtol=1e-4, atol=1e-5, msg=kind)
            assert samples >= (2 if size == 1 and most == m0 else 5), kind
            np.testing.assert_allclose(noise, np.mean(told[:samples], axis=0), rtol=1e-3, err_msg=kind)


def test_estimates_are_unbiased_for_unequal_weights() -> None:
    """Ten thousand steps of four ranks; one rank has most of the tokens."""
    generator = torch.Generator().manual_seed(0)
    t, truth_sqr, per_token, steps, size = torch.tensor([1.0, 2.0, 4.0, 40.0]), 4.0, 30.0, 10_000, 8
    mean = torch.full((size,), (truth_sqr / size) ** 0.5)
    noise = torch.randn(steps, 4, size, generator=generator) * (per_token / size) ** 0.5
    own = (mean + noise / t.sqrt()[None, :, None]) * (t * 4 / t.sum())[None, :, None]
    weights = step_weights(t.sum(), t.square().sum(), 4, t.sum())
    found, naive = [], []
    for rows in own:
        local, total = rows.square().sum(1).mean()[None], rows.mean(0).square().sum()[None]
        pair = as_equal(local, total, weights, 4, parts=(False, False))
        kind = SampleKind(4, 8, 1.0)
        read = [summed([part], 1, torch.device("cpu"))[0].double().numpy() for part in pair]
        found.append(np.concatenate(unbiased(kind, *read, 32)))
        plain = [summed([added(part)], 1, torch.device("cpu"))[0].double().numpy() for part in (local, total)]
        naive.append(np.concatenate(unbiased(kind, *plain, 32)))
    wanted = np.array([truth_sqr, per_token / float(t.sum())])
    error = np.std(found, axis=0) / steps**0.5
    assert (np.abs(np.mean(found, axis=0) - wanted) < 4 * error).all()
    assert (np.abs(np.mean(naive, axis=0) - wanted) > 10 * error).all(), "a test that anything passes"


def test_a_step_without_any_token_changes_nothing() -> None:
    job = attached(1.0)
    before = [p.detach().clone() for p in job.module.parameters()]
    for x, y, _ in job.loader(data(32), 32, per_gpu=(1, 16)):
        assert job.step(lambda x=x, y=y: summed_loss(job.model, x, y, torch.zeros(16)), weight=0) is not None
    assert all(torch.equal(a, b) for a, b in zip(before, job.module.parameters(), strict=True))
    job.close()


def refused(*weights: Any, outside: bool = False) -> str:
    """Make a pass with each of the weights; return what the last one is told."""
    job = attached(0.1)
    told = ""
    for (x, y, _), weight in zip(job.loader(data(), 32, per_gpu=(1, 8)), weights, strict=False):
        try:
            with contextlib.nullcontext() if outside else job.micro_batch():
                job.backward(summed_loss(job.model, x, y, torch.ones(8)), weight=weight)
        except LoopMistake as error:
            told = str(error)
    job.close()
    return told


def test_weights_that_do_not_fit_together_are_refused_with_the_line_to_change() -> None:
    assert "Put it under `with job.micro_batch():`" in refused(8, outside=True)
    for bad in (-1.0, float("nan"), torch.ones(8)):
        assert "tokens that the loss is summed over" in refused(bad)
    assert on_the_page(refused(None, 8))
    assert on_the_page(refused(8, None))
    assert refused(8, 8, 8, 8) == ""
