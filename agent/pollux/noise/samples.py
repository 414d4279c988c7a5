"""Measured squared norms on their way to the averages: kept on the device, and read back many together.

Only reading waits for the device, once for many samples; and what can be done for many together is: the parameters'
norms are added up only when they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.noise.noise_scale import NoiseAverages, SampleKind
from pollux.noise.precondition import index_of


class Squares(NamedTuple):
    """A squared norm per parameter group, not added up yet."""

    norms: Tensor | None
    """To be squared; float32."""
    places: tuple[int, ...]
    """The parameter group of each of them."""
    rest: Tensor | None = None
    """What is added up already, [groups]."""


def added(norms: Tensor) -> Squares:
    """What is added up already: squared norms [groups]."""
    return Squares(None, (), norms)


def summed(squares: Sequence[Squares], groups: int, device: torch.device) -> Tensor:
    """Each one's squared norm per parameter group, float32 [squares, groups]."""
    rows = []
    for places, found in groupby(squares, key=lambda one: one.places):
        alike = list(found)
        row = torch.zeros(len(alike), groups, dtype=torch.float32, device=device)
        if places:
            norms = torch.stack([one.norms for one in alike if one.norms is not None])
            row.index_add_(1, index_of(places, device), norms.square_())
        for sum_of, one in zip(row, alike, strict=True):
            if one.rest is not None:
                sum_of.add_(one.rest)
        rows.append(row)
    return torch.cat(rows)


class SampleBuffer:
    """Samples of (local, total) squared norms on the device, read back together.

    `flush` starts the reduction over the ranks; `collect` takes the result in at a later step, when that has long
    happened, and copies it to the host. Every rank must call them at the same steps.
    """

    def __init__(
        self,
        groups: int,
        device: torch.device,
        *,
        rows: int,
        group: dist.ProcessGroup | None,
        parts: tuple[bool, bool] = (False, False),
    ) -> None:
        self.groups = groups
        self.rows = rows
        self._group = group
        self._parts = parts
        """Whether each rank has its part of the local, of the total squared norm, which add up; else their mean counts:
        each rank has its own gradient's, and all have the same total."""
        self._device = device
        self._kinds: list[SampleKind] = []
        self._local: list[Squares] = []
        self._total: list[Squares] = []
        self._pending: tuple[Tensor, list[SampleKind], Any] | None = None

    @property
    def full(self) -> bool:
        return len(self._kinds) >= self.rows

    @property
    def empty(self) -> bool:
        """No samples wait to be read."""
        return not self._kinds

    @property
    def under_way(self) -> bool:
        """Samples are being read."""
        return self._pending is not None

    def add(self, kind: SampleKind, local: Squares, total: Squares) -> None:
        """Queue one sample; dropped where the buffer is full."""
        if self.full:
            return
        self._local.append(local)
        self._total.append(total)
        self._kinds.append(kind)

    def flush(self) -> None:
        """Start reading the samples back; nothing to do where there are none or a read is under way."""
        if not self._kinds or self._pending is not None:
            return
        found = [summed(squares, self.groups, self._device) for squares in (self._local, self._total)]
        work = None
        if self._group is not None:
            for part, rows in zip(self._parts, found, strict=True):
                if not part:
                    rows.div_(dist.get_world_size(self._group))
        data = torch.cat(found, 1)
        if self._group is not None:
            work = dist.all_reduce(data, group=self._group, async_op=True)
        self._pending = (data, self._kinds, work)
        self._kinds, self._local, self._total = [], [], []

    def collect(self, averages: NoiseAverages, initial: float) -> None:
        """Take the samples of the last flush into `averages`."""
        if self._pending is None:
            return
        data, kinds, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        host = data.to("cpu", torch.float64).numpy()
        first = 0
        for kind, alike in groupby(kinds):
            rows = host[first : first + len(list(alike))]
            averages.add(kind, rows[:, : self.groups], rows[:, self.groups :], initial)
            first += len(rows)

    def clear(self) -> None:
        """Forget what was not read yet (the ranks change)."""
        if self._pending is not None and self._pending[2] is not None:
            self._pending[2].wait()
        self._pending = None
        self._kinds, self._local, self._total = [], [], []
