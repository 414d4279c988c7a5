"""Equal parts of the ranks, for losses over the samples of all ranks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.nn.functional import all_gather
from torch.utils.data import TensorDataset

from pollux.loop import slips
from tests.unit.agent.loading import DATA, loaders
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, logged


@pytest.mark.parametrize("kind", [kind for kind in DATA if kind != "sampled-ahead"])
@pytest.mark.parametrize(
    ("length", "ranks", "local"), [(97, 3, 8), (25, 3, 8), (26, 4, 8), (7, 4, 1), (96, 3, 8)]
)
def test_parts_are_equal_and_every_sample_is_there(kind: str, length: int, ranks: int, local: int) -> None:
    options = {"shuffle": False} if kind == "map" else {}
    each = loaders(length, ranks, local, kind=kind, equal_parts=True, **options)
    seen: Counter[int] = Counter()
    total = 0
    for parts in zip(*each, strict=True):
        sizes = {len(part) for part in parts}
        assert len(sizes) == 1, sizes
        assert {loader.weight for loader in each} == {1.0}
        assert sizes == {1} or min(sizes) >= 2 or local == 1
        total += each[0].samples
        seen.update(int(number) for part in parts for number in part)
    assert set(seen) == set(range(length))
    assert total == length
    assert sum(seen.values()) - length < 2 * ranks


def gathered(options: dict[str, bool]) -> tuple[int, list[str]]:
    """Train by a loss over all ranks' features: steps, and the messages.

    Without equal parts, the last pass would end the process.
    """
    said = logged()
    job = attached(0.01)
    loader = job.loader(TensorDataset(torch.randn(65, 6)), 16, **options)  # type: ignore[arg-type]
    for _ in job.epochs(1, statistical=True):
        for (x,) in loader:
            job.step(lambda x=x: torch.cat(all_gather(job.model(x))).var())  # type: ignore[no-untyped-call]
            if not options and job.progress.optimizer_steps == 3:
                return 3, said
    steps = job.progress.optimizer_steps
    job.close()
    return steps, said


def test_a_loss_over_all_ranks_needs_equal_parts(ranks: Any) -> None:
    assert ranks(2, gathered, {"equal_parts": True}) == [(5, [])] * 2
    assert ranks(2, gathered, {"drop_last": True}) == [(5, [])] * 2, "the epoch ends in the next pass"
    assert ranks(2, gathered, {}) == [(3, [slips.GATHERS]), (3, [])]
    assert on_the_page(slips.GATHERS)


def fails_in_an_uneven_pass() -> list[str]:
    said = logged()
    job = attached(0.01)

    def loss(x: torch.Tensor) -> torch.Tensor:
        if len(x) < 8:
            raise RuntimeError("shapes differ")
        found: torch.Tensor = job.model(x).var()
        return found

    def train() -> None:
        for (x,) in job.loader(TensorDataset(torch.randn(23, 6)), 16):
            job.step(lambda x=x: loss(x))

    with pytest.raises(RuntimeError, match="shapes differ"):
        train()
    return said


def test_a_failure_where_parts_differ_names_them(ranks: Any) -> None:
    assert ranks(2, fails_in_an_uneven_pass) == [[slips.UNEVEN % (4, 0, 7)], [slips.UNEVEN % (3, 1, 7)]]
