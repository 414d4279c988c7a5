"""What a script gives that works on one rank, or in another loop, alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import update_bn
from torch.utils.data import Dataset, IterableDataset

from pollux import attach
from pollux.errors import LoopMistake, PolluxAgentError
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, logged, network


class Branches(nn.Module):
    """Has two ways, and leaves one out: always the second, or the first in each third pass."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ways = nn.ModuleList([nn.Linear(6, 16), nn.Linear(6, 16)])
        self.out = nn.Linear(16, 1)
        self.random, self.passes = random, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        used = [self.ways[0]] if not self.random or self.passes % 3 == 0 else list(self.ways)
        out: Tensor = self.out(torch.tanh(sum(way(x) for way in used)))
        return out


def unused(random: bool, options: dict[str, Any]) -> tuple[list[str], str]:
    said, model = logged(), Branches(random)
    job = attach(model, torch.optim.SGD(model.parameters(), 0.05), adaptive=False, ddp_kwargs=options)
    loader = job.loader(data(96), 16)
    try:
        for _ in job.epochs(1):
            for x, y, _ in loader:
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    except PolluxAgentError as error:
        return [], str(error)
    job.close()
    return [line for line in said if "find_unused_parameters" in line], ""


@pytest.mark.parametrize("random", [False, True])
def test_unused_parameters_are_named_on_one_rank_and_refused_on_two(ranks: Any, random: bool) -> None:
    (((line,), _),) = ranks(1, unused, random, {})
    assert "2 of 6 parameters that require a gradient" in line
    for _, error in ranks(2, unused, random, {}):
        assert on_the_page(f"LoopMistake: {error}")
        assert 'ddp_kwargs={"find_unused_parameters": True}' in error
    for size in (1, 2):
        assert ranks(size, unused, random, {"find_unused_parameters": True}) == [([], "")] * size


def test_an_optimizer_of_two_steps_is_refused() -> None:
    class Sharpness(torch.optim.SGD):
        def first_step(self) -> None: ...
        def second_step(self) -> None: ...

    model = network()
    with pytest.raises(PolluxAgentError, match="attach its base_optimizer"):
        attach(model, Sharpness(model.parameters(), 0.1))


def test_a_lazy_module_is_refused_by_name() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 1))
    with pytest.raises(PolluxAgentError, match=r"the lazy 0\.weight: call model\(x\) once"):
        attach(model, torch.optim.SGD(model.parameters(), 0.1))


class Batches(IterableDataset[tuple[Tensor, ...]]):
    """Gives whole batches, or the rows of them."""

    def __init__(self, whole: bool) -> None:
        self.whole = whole

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        x, y, _ = data(192).tensors
        for start in range(0, 192, 16):
            batch = x[start : start + 16], y[start : start + 16]
            yield from [batch] if self.whole else zip(*batch, strict=True)


@pytest.mark.parametrize(("whole", "size", "length"), [(True, 16, 192), (True, 1, 12), (False, 16, 192)])
def test_a_stream_of_whole_batches_is_named(whole: bool, size: int, length: int) -> None:
    said, job = logged(), attached()
    loader = job.loader(Batches(whole), size, length=length)
    next(iter(loader))
    assert any("if it gives whole batches" in line for line in said) is whole
    job.close()


def test_batch_norm_is_not_counted_by_the_loader_of_a_training_that_is_over() -> None:
    said, job = logged(), attached()
    loader = job.loader(data(96), 16)
    for _ in job.epochs(1):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    assert not any("an epoch that is over" in line for line in said)
    update_bn(loader, nn.BatchNorm1d(6))
    job.close()
    assert sum("update_bn, an evaluation" in line for line in said) == 1


@pytest.mark.parametrize("hooked", [True, False])
def test_an_optimizer_that_steps_in_the_backward_pass_is_named(hooked: bool) -> None:
    said, model = logged(), network()
    own = {p: torch.optim.SGD([p], 0.05) for p in model.parameters()}

    def step(p: Tensor) -> None:
        own[p].step()
        own[p].zero_grad()

    for p in model.parameters() if hooked else ():
        p.register_post_accumulate_grad_hook(step)
    job = attach(model, torch.optim.SGD(model.parameters(), 0.05), adaptive=False)
    for x, y, _ in job.loader(data(96), 16):
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    assert sum("changed within a pass" in line for line in said) == hooked


def test_a_second_loop_in_an_epoch_is_told_of_once() -> None:
    said, job = logged(), attached()
    loader = job.loader(data(96), 16)
    batches = 0
    for _ in job.epochs(2):
        for _ in range(2):
            for x, y, _ in loader:
                batches += 1
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    assert batches == 12
    assert sum("began again in an epoch that is over" in line for line in said) == 1


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (lambda loss: (loss.mean(), 1), "tuple"),
        (lambda loss: float(loss.mean().detach()), "float"),
        (lambda loss: loss, r"a tensor of shape \[16, 1\]"),
    ],
)
def test_what_is_no_loss_is_refused(loss: Any, got: str) -> None:
    job = attached()
    loader = job.loader(data(96), 16)
    x, y, _ = next(iter(loader))
    with pytest.raises(LoopMistake, match=f"return one number as a tensor.*got {got}"):
        job.step(lambda: loss(mse_loss(job.model(x), y, reduction="none")))
    job.close()


class Growing(Dataset[tuple[Tensor, ...]]):
    length = 96

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        return tuple(data(192)[i])


@pytest.mark.parametrize("stop", [7, 10, 14, 15])
def test_a_script_whose_data_grow_is_restored_in_every_epoch(tmp_path: Path, stop: int) -> None:
    def train(most: int) -> list[int]:
        rows, job = Growing(), attached(checkpoint_dir=tmp_path)
        loader, seen = job.loader(rows, 16), []
        for epoch in job.epochs(3):
            rows.length = 96 + 32 * epoch
            for x, y, ids in loader:
                seen += ids.tolist()
                job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
                if job.progress.optimizer_steps == most:
                    job.close()
                    return seen
        job.close()
        return seen

    seen = train(stop) + train(0)
    assert [sorted(seen[a:b]) for a, b in ((0, 96), (96, 224), (224, 384))] == [
        list(range(n)) for n in (96, 128, 160)
    ]


@pytest.mark.parametrize(("taken", "told"), [(5, 1), (12, 0)])
def test_epochs_that_are_left_early_are_told_of_once(taken: int, told: int) -> None:
    said, job = logged(), attached()
    loader = job.loader(data(192), 16)
    for _ in job.epochs(3):
        for x, y, _ in itertools.islice(loader, taken):
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    assert sum("left at sample 80 of 192" in line for line in said) == told
