"""Which samples each rank takes next: pure arithmetic, no torch, the same on every rank.

A pass over a dataset of n samples is one global order, a permutation of 0..n-1 that depends on the seed and
the pass number alone. Progress through it is one integer, the position: how many samples of the order are
used. Because neither depends on the number of ranks or the batch size, a pass may change both at any
position and still take every sample exactly once: micro-batch after micro-batch takes the next
world_size * local_batch samples of the order, and rank r its r-th slice. Near the end fewer are left; they
are split as evenly as integers allow, and a rank left with none takes a stand-in of weight 0, so that its
collectives still match the others'.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Order = npt.NDArray[np.int64]


class MicroBatch(NamedTuple):
    """One micro-step: the global slice `start:stop` of the order, this rank's `local_start:local_stop`."""

    start: int
    stop: int
    local_start: int
    local_stop: int
    world_size: int
    last: bool
    """No further micro-batch in this pass."""

    @property
    def samples(self) -> int:
        """Samples over all ranks."""
        return self.stop - self.start

    @property
    def local_samples(self) -> int:
        """Samples of this rank; 0 when it only stands in."""
        return self.local_stop - self.local_start

    @property
    def weight(self) -> float:
        """Factor of this rank's mean loss that makes the mean over ranks the mean over samples."""
        return self.local_samples * self.world_size / self.samples


def next_micro_batch(
    length: int, position: int, *, rank: int, world_size: int, local_batch: int, drop_last: bool = False
) -> MicroBatch | None:
    """Return the micro-batch at `position` of a pass of `length` samples; None where the pass has ended.

    With `drop_last`, a rest smaller than world_size * local_batch ends the pass.
    """
    left = length - position
    full = world_size * local_batch
    if left >= full:
        # Nearly always, and between any two steps: nothing to be shared out.
        own = position + rank * local_batch
        rest = left - full
        last = rest == 0 or (drop_last and rest < full)
        return MicroBatch(position, position + full, own, own + local_batch, world_size, last)
    if left <= 0 or drop_last:
        return None
    share, extra = divmod(left, world_size)
    own = position + rank * share + min(rank, extra)
    return MicroBatch(position, length, own, own + share + (rank < extra), world_size, True)


def pass_order(length: int, seed: int, pass_index: int) -> Order:
    """The permutation [length] of one pass. Depends on nothing but the arguments."""
    # PCG64 seeded by the pair: unlike seed + pass_index, neighbouring seeds share no pass.
    generator = np.random.Generator(np.random.PCG64([seed & (2**64 - 1), pass_index]))
    return generator.permutation(length).astype(np.int64, copy=False)


def order_digest(order: Order) -> int:
    """CRC-32 of an order: tells whether a sampler gives the same order again after a restart."""
    return zlib.crc32(np.ascontiguousarray(order).data)
