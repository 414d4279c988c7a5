"""Tell whether ranks, or starts of a job, have the same indexed data: its length, and checksums of a few samples.

Each sample is read twice. What differs between the two readings (random augmentation) is not compared. The reading
leaves no trace in the training: global random numbers are put back, the dataset's own generators are copies, and a
dataset that is read by workers is read by one here, too.
"""

from __future__ import annotations

import copy
import logging
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from pollux.data.stream import checksum

logger = logging.getLogger("pollux")

BUDGET_S = 1.0
"""For these readings at the start; what was not read until then is not compared."""
WAIT_S = 20.0
"""For the worker that makes them."""

Identity = list[Any]
"""The length, then [number, checksums of its parts] of each sample read; a checksum is None where readings differ."""


def identity(dataset: Any, length: int, workers: int) -> Identity:
    """Return what the data is known by. `workers`: of its loader."""
    numbers = sorted({0, length // 2, length - 1})
    reader = _SampleReader(dataset)
    found: list[Any] = [length]
    ends = time.monotonic() + BUDGET_S
    try:
        if workers:
            options: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork", "timeout": WAIT_S}
            found += list(
                DataLoader(reader, batch_size=None, sampler=numbers, collate_fn=_as_it_is, **options)
            )
        else:
            found += [reader[number] for number in numbers if time.monotonic() < ends]
    except Exception as error:  # the loop over the loader meets it, too
        logger.debug("samples were not compared: %r", error)
    return found


def difference(mine: Identity, other: Identity) -> int | None:
    """Return the number of the first sample that is another one; None where there is none."""
    theirs = dict(other[1:])
    for number, parts in mine[1:]:
        pairs = zip(parts, theirs.get(number, ()), strict=False)
        if any(a != b and a is not None and b is not None for a, b in pairs):
            return int(number)
    return None


def _as_it_is(value: Any) -> Any:
    return value


class _SampleReader(Dataset[Any]):
    """Gives [number, checksums of a sample's parts]."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitem__(self, number: int) -> list[Any]:
        first, second = (self._read(number) for _ in range(2))
        same = zip(first, second, strict=True) if len(first) == len(second) else ()
        return [number, [a if a == b else None for a, b in same]]

    def _read(self, number: int) -> list[int]:
        with _own_numbers():
            return [checksum(part) for part in _parts(_with_own_generators(self._dataset)[number])]


def _parts(sample: Any) -> Sequence[Any]:
    if isinstance(sample, dict):
        return list(sample.values())
    return sample if isinstance(sample, list | tuple) else [sample]


def _with_own_generators(dataset: Any) -> Any:
    """Return a shallow copy whose random generators are its own."""
    kinds = (np.random.Generator, np.random.RandomState, random.Random)
    held = {
        k: v for k, v in getattr(dataset, "__dict__", {}).items() if isinstance(v, (*kinds, torch.Generator))
    }
    if not held:
        return dataset
    copied = copy.copy(dataset)
    for name, generator in held.items():
        if isinstance(generator, torch.Generator):
            own = torch.Generator(generator.device)
            own.set_state(generator.get_state())
            setattr(copied, name, own)
        else:
            setattr(copied, name, copy.deepcopy(generator))
    return copied


@contextmanager
def _own_numbers() -> Iterator[None]:
    """Draw the same global random numbers in each reading, and put the script's back."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
