"""How one GPU's share of a batch grows where the user sets no bound."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pollux import attach
from pollux.goodput import BatchChoice, BatchLimits
from pollux.training.memory import MemoryBounds

LIMITS = BatchLimits(8, 128, 1, 128)


def begun(per_gpu: tuple[int, int] | None = None, *, adaptive: bool = True) -> Any:
    model = torch.nn.Linear(2, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01), adaptive=adaptive)
    job.loader(torch.utils.data.TensorDataset(torch.zeros(256, 2)), 8, max_batch_size=64, per_gpu=per_gpu)
    job.close()
    return job.training


@pytest.mark.parametrize(
    ("per_gpu", "at_first", "shares", "allowed"),
    [
        # M0 has not been trained yet: twice as much is the next size. It never exceeds the largest batch size.
        (None, 16, (16, 32, 64), [32, 64, 64]),
        (None, 16, (32, 4), [64, 64]),  # a smaller batch takes no room away
        ((2, 12), 12, (12,), [12]),  # the user's bound stays
    ],
)
def test_a_share_doubles_with_each_batch_that_has_been_trained(
    per_gpu: tuple[int, int] | None, at_first: int, shares: tuple[int, ...], allowed: list[int]
) -> None:
    training = begun(per_gpu)
    assert training.limits.local_max == at_first
    seen = []
    for share in shares:
        training.choice = BatchChoice(share, 0)
        training.widen()
        seen.append(training.limits.local_max)
    assert seen == allowed


@pytest.mark.parametrize("by_epochs", [True, False])
def test_a_batch_grows_after_as_many_epochs_as_its_user_wants(by_epochs: bool) -> None:
    model = torch.nn.Linear(2, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = torch.utils.data.TensorDataset(torch.zeros(16, 2))
    loader = job.loader(data, 8, max_batch_size=16, per_gpu=(1, 16), grow_after=2)
    seen = set()
    for epoch in job.epochs(4) if by_epochs else range(4):
        for (x,) in loader:
            job.step(lambda x=x: job.model(x).sum())
            seen.add((epoch, job.training.limits.maximum, job.training.advisor.limits.maximum))
    job.close()
    assert sorted(seen) == [(0, 8, 8), (1, 8, 8), (2, 16, 16), (3, 16, 16)]


def test_a_fixed_batch_keeps_its_share() -> None:
    assert begun(adaptive=False).limits.local_max == 8


@pytest.mark.parametrize(
    ("free", "reserved", "peak", "most"),
    [
        (60, 20, 20, 57),  # 16 examples took 20 of 80 bytes: 0.9 * 4 * 16
        (500, 20, 20, 128),  # the limits' own bound
        (1, 20, 20, 16),  # short already: what has been trained stays
        (60, 0, 0, 128),  # nothing measured yet
    ],
)
def test_a_share_grows_no_further_than_the_memory_is_expected_to_hold(
    monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, peak: int, most: int
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    assert MemoryBounds(torch.device("cuda"), None).most_within(LIMITS, 16) == most
    assert MemoryBounds(torch.device("cpu"), None).most_within(LIMITS, 16) == LIMITS.local_max


def test_a_bound_by_memory_is_that_of_one_gpu_type(tmp_path: Path) -> None:
    memory = MemoryBounds(torch.device("cpu"), tmp_path, "v100")
    assert memory.by_type(LIMITS) == {}
    memory.within(LIMITS, lambda mine: [mine])
    memory.lower(16)
    assert memory.by_type(replace(LIMITS, local_max=16)) == {"": 128, "v100": 16}
    elsewhere = MemoryBounds(torch.device("cpu"), tmp_path, "a100")
    elsewhere.within(LIMITS, lambda mine: [mine])
    assert elsewhere.by_type(replace(LIMITS, local_max=32)) == {"": 32, "v100": 16}, "32 so far: it grows"
