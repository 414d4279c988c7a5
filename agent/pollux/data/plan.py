"""Compute the samples that each rank takes next: arithmetic only.

A pass over a dataset of n samples is one global order, a permutation of 0..n-1 that depends on the seed and the pass
number alone. Progress through the order is one integer, the position: how many samples of it are used. Neither depends
on the number of ranks or the batch size, so a pass may change both at any position and still takes every sample exactly
once. Each micro-batch takes the next world_size * local_batch samples of the order, and rank r takes the r-th slice.

Near the end fewer samples are left. Batch normalisation stops with an error at one example, so no rank has a single
example where the sizes allow that: a small rest goes to fewer ranks, and a rest of one sample gets the last sample of
the micro-batch before it. A rank that has none takes stand-ins of weight 0, so that its collectives match the others'.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


class MicroBatch(NamedTuple):
    """A slice `start:stop` of the order, and `local_start:local_stop` of it."""

    start: int
    stop: int
    local_start: int
    local_stop: int
    world_size: int
    last: bool
    """No further micro-batch in this pass."""
    equal: bool = False
    """All ranks have equally many samples, some of them twice."""

    @property
    def samples(self) -> int:
        """Samples over all ranks."""
        return self.stop - self.start

    @property
    def local_samples(self) -> int:
        """Samples of this rank; 0 for a stand-in."""
        return self.local_stop - self.local_start

    @property
    def stand_ins(self) -> tuple[int, int]:
        """The slice that a rank without samples loads, at weight 0. It lies in this same micro-batch."""
        return self.start, min(self.start + FEWEST, self.stop)

    @property
    def weight(self) -> float:
        """Factor of this rank's mean loss; the ranks' mean is then per sample."""
        own, all_ranks = self.local_stop - self.local_start, self.stop - self.start
        return 1.0 if self.equal else own * self.world_size / all_ranks


FEWEST = 2
"""Examples of a rank in a micro-batch, at least, where sizes allow: batch normalisation needs two."""


def next_micro_batch(
    length: int,
    position: int,
    *,
    rank: int,
    world_size: int,
    local_batch: int,
    drop_last: bool = False,
    equal_parts: bool = False,
) -> MicroBatch | None:
    """Return the micro-batch at a position; None at the end of the pass.

    With `drop_last`, the pass ends when fewer than world_size * local_batch samples remain. With `equal_parts`, the
    parts of a small rest overlap where it cannot be divided equally.
    """
    left = length - position
    full = world_size * local_batch
    spare_one = left == full + 1 and local_batch > FEWEST and not drop_last
    if left >= full and not spare_one:
        # The usual case: every rank gets a full local batch.
        own = position + rank * local_batch
        rest = left - full
        last = rest == 0 or (drop_last and rest < full)
        return MicroBatch(position, position + full, own, own + local_batch, world_size, last)
    if left <= 0 or drop_last:
        return None
    if equal_parts:
        if spare_one:
            return _shared(position, position + full - world_size, rank, world_size, last=False)
        each = max(-(-left // world_size), min(FEWEST, left))
        own = position + min(rank * each, left - each)
        return MicroBatch(position, length, own, own + each, world_size, True, equal=True)
    if spare_one:
        return _shared(position, position + full - 1, rank, world_size, last=False)
    if FEWEST <= left < FEWEST * world_size and local_batch >= FEWEST + left % FEWEST:
        # Fewer ranks have samples, and the others stand in: the first one has the odd sample.
        owners, odd = divmod(left, FEWEST)
        start = position + min(rank, owners) * FEWEST + (odd if rank else 0)
        own_samples = (FEWEST + (odd if rank == 0 else 0)) if rank < owners else 0
        return MicroBatch(position, length, start, start + own_samples, world_size, True)
    return _shared(position, length, rank, world_size, last=True)


def _shared(start: int, stop: int, rank: int, world_size: int, *, last: bool) -> MicroBatch:
    """Split the slice as evenly as integers allow."""
    share, extra = divmod(stop - start, world_size)
    own = start + rank * share + min(rank, extra)
    return MicroBatch(start, stop, own, own + share + (rank < extra), world_size, last)


def pass_order(length: int, seed: int, pass_index: int) -> Order:
    """Return the permutation [length] of one pass."""
    # A seed of two numbers: with seed + pass_index, neighbouring seeds would share orders.
    generator = np.random.Generator(np.random.PCG64([seed & (2**64 - 1), pass_index]))
    return generator.permutation(length).astype(np.int64, copy=False)


def order_digest(order: Order) -> int:
    """Return the CRC-32 of an order, to compare a sampler's orders."""
    return zlib.crc32(np.ascontiguousarray(order).data)
