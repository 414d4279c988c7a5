"""What a script gives that works on one rank, or in another loop, alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import IterableDataset

from pollux import attach
from pollux.errors import PolluxAgentError
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


@pytest.mark.parametrize(("taken", "told"), [(5, 1), (12, 0)])
def test_epochs_that_are_left_early_are_told_of_once(taken: int, told: int) -> None:
    said, job = logged(), attached()
    loader = job.loader(data(192), 16)
    for _ in job.epochs(3):
        for x, y, _ in itertools.islice(loader, taken):
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    job.close()
    assert sum("left at sample 80 of 192" in line for line in said) == told
