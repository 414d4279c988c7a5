"""Keep measured squared norms on the device; read many together.

Only reading waits for the device, once for many samples. The norms of the parameters are added up when they are read,
for many samples together.
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
from pollux.ranks.arrival import Arrival
from pollux.ranks.control import lost_peer


class Squares(NamedTuple):
    """A squared norm per parameter group, in parts."""

    norms: Tensor | None
    """Norms, float32; squared when they are added up."""
    places: tuple[int, ...]
    """The parameter group of each norm."""
    rest: Tensor | None = None
    """Squared norms added up already, [groups]."""


def added(norms: Tensor) -> Squares:
    """Return squared norms [groups] that are added up already."""
    return Squares(None, (), norms)


def summed(squares: Sequence[Squares], groups: int, device: torch.device) -> Tensor:
    """Return each one's squared norm per group, float32 [squares, groups]."""
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
    """Samples of (local, total) squared norms on the device, read together.

    `flush` starts the reduction over the ranks. `collect`, at the next step, starts the copy of its result to the host,
    and takes it in at the one after: the host never waits for the work that it has queued last. Every rank must call
    them at the same steps.
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
        self.group = group
        self.parts = parts
        """Whether each rank holds a part of the local, and of the total squared norm. Parts add up. Otherwise the
        ranks' mean counts: each rank has the norm of its own gradient, and all have the same total."""
        self._device = device
        self.kinds: list[SampleKind] = []
        """Of the samples that wait to be read."""
        self.arriving = False
        """Others are being read."""
        self._local: list[Squares] = []
        self._total: list[Squares] = []
        self._pending: tuple[Tensor, list[SampleKind], Any] | None = None
        self._copied: tuple[Arrival, list[SampleKind]] | None = None

    @property
    def full(self) -> bool:
        return len(self.kinds) >= self.rows

    def add(self, kind: SampleKind, local: Squares, total: Squares) -> None:
        """Queue one sample; a full buffer drops it."""
        if self.full:
            return
        self._local.append(local)
        self._total.append(total)
        self.kinds.append(kind)

    def flush(self) -> None:
        """Start reading the samples."""
        assert self.kinds, "there are samples"
        assert self._pending is None, "no earlier ones are being read"
        found = [summed(squares, self.groups, self._device) for squares in (self._local, self._total)]
        work = None
        if self.group is not None:
            for part, rows in zip(self.parts, found, strict=True):
                if not part:
                    rows.div_(dist.get_world_size(self.group))
        data = torch.cat(found, 1)
        if self.group is not None:
            work = dist.all_reduce(data, group=self.group, async_op=True)
        self._pending, self.arriving = (data, self.kinds, work), True
        self.kinds, self._local, self._total = [], [], []

    def collect(self, averages: NoiseAverages, initial: float) -> None:
        """Take the samples that have arrived into `averages`."""
        self._take_in(averages, initial)
        if self._pending is None:
            return
        data, kinds, work = self._pending
        self._pending = None
        self.arriving = _arrived(work)
        if self.arriving:
            self._copied = Arrival(data), kinds
            if not data.is_cuda:
                self._take_in(averages, initial)

    def _take_in(self, averages: NoiseAverages, initial: float) -> None:
        if self._copied is None:
            return
        (copy, kinds), self._copied, self.arriving = self._copied, None, False
        host = copy.read().to(torch.float64).numpy()
        first = 0
        for kind, alike in groupby(kinds):
            rows = host[first : first + len(list(alike))]
            averages.add(kind, rows[:, : self.groups], rows[:, self.groups :], initial)
            first += len(rows)

    def discard(self) -> None:
        """Wait for a reduction that is under way; forget all samples."""
        if self._pending is not None:
            _arrived(self._pending[2])
        self.clear()

    def clear(self) -> None:
        """Forget samples that were not read, without waiting: after a loss some reductions may never end."""
        self._pending, self._copied, self.arriving = None, None, False
        self.kinds, self._local, self._total = [], [], []


def _arrived(work: dist.Work | None) -> bool:
    """Wait for a reduction; False where a rank is gone.

    A lost rank surfaces in the next collective; a lost noise sample can be dropped.
    """
    if work is not None:
        try:
            work.wait()
        except RuntimeError as error:
            if not lost_peer(error):
                raise
            return False
    return True
