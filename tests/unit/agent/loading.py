"""Data of every kind, and the loaders of all ranks in one process.

Each sample is its own number.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, RandomSampler

from pollux.data.loader import ElasticLoader
from pollux.data.place import RankShare
from pollux.data.stream import ElasticStream


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The numbers, in a new order for each pass."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pass_index = 0

    def set_epoch(self, pass_index: int) -> None:
        self.pass_index = pass_index

    def __iter__(self) -> Any:
        return iter(np.roll(np.arange(self.length), self.pass_index).tolist())


class StatefulStream(Stream):
    """A stream that resumes from a saved state and counts the samples read."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.given = self.start = self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]

    def __iter__(self) -> Any:
        self.given, self.start = self.start, 0
        for number in list(super().__iter__())[self.given :]:
            self.given += 1
            self.read += 1
            yield number


class ReadingAhead:
    """Stand in for torch's loader with workers, which reads ahead.

    Plan and make up to `depth` batches before the loop asks for them.
    """

    def __init__(self, loader: Any, depth: int) -> None:
        self.loader, self.depth = loader, depth

    def __iter__(self) -> Any:
        made: deque[torch.Tensor] = deque()
        plans = iter(self.loader._feed)
        while True:
            made += [torch.tensor(plan) for plan in islice(plans, self.depth - len(made))]
            if not made:
                return
            yield made.popleft()


DATA: dict[str, Any] = {
    "map": Numbers,
    "sampled-ahead": Numbers,
    "stream": Stream,
    "stateful": StatefulStream,
}


def one_rank(kind: str, length: int, rank: int, world_size: int, local_batch: int, **options: Any) -> Any:
    indexed = DATA[kind] is Numbers
    make: Any = ElasticLoader if indexed else ElasticStream
    if kind == "sampled-ahead":
        options["timeout"] = 0  # any option of torch's loader makes it the one to load
        options["sampler"] = RandomSampler(Numbers(length))
    loader = make(DATA[kind](length), RankShare(rank, world_size, local_batch), **options)
    if kind == "sampled-ahead":
        loader._loader = ReadingAhead(loader, 3)
    return loader


def loaders(
    length: int, world_size: int, local_batch: int, *, kind: str = "map", **options: Any
) -> list[Any]:
    return [one_rank(kind, length, rank, world_size, local_batch, **options) for rank in range(world_size)]
