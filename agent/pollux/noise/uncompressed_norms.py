"""Sum gradients beside a communication hook that may compress them.

A user's hook may change the gradient (PowerSGD), so a measured step sums it once more. It does so piece by piece, since
a copy of the whole would be as large as the model. It uses a process group of its own: PowerSGD goes on in a thread of
its process group, and in one group the order of its messages and these would differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.noise.precondition import CHUNK, GradientNorms
from pollux.ranks.world import new_group


class _Piece(NamedTuple):
    """A run of a bucket's elements: whole parameters, or a part of one."""

    start: int
    stop: int
    params: list[Tensor]
    grads: list[Tensor]
    within: int | None
    """Begin within its parameter, if it is a part of one."""


class UncompressedSums:
    """Measure buckets: this rank's gradient, and the mean over the ranks."""

    def __init__(self, norms: GradientNorms, world_size: int) -> None:
        self._norms = norms
        self._size = world_size
        self._group = new_group()

    def measure(self, bucket: Any) -> tuple[Tensor, Tensor]:
        """Return (|g_b|^2 of this rank, |g_B|^2), each [groups] on the device. Ranks call it for the same buckets."""
        buffer, params, grads = bucket.buffer(), bucket.parameters(), bucket.gradients()
        local = self._norms.of(params, grads)
        total = torch.zeros_like(local)
        for piece in _pieces(buffer, params, grads, whole=self._norms.turned):
            mean = buffer[piece.start : piece.stop] * (1.0 / self._size)
            dist.all_reduce(mean, group=self._group)
            if piece.within is not None:
                total += self._norms.of_flat(piece.params[0], mean, piece.within)
            else:
                shift = mean.storage_offset() - buffer.storage_offset() - piece.start
                seen = [mean.as_strided(g.shape, g.stride(), g.storage_offset() + shift) for g in piece.grads]
                total += self._norms.of(piece.params, seen)
            del mean  # before the next piece allocates its own
        return local, total


def _pieces(
    buffer: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor], *, whole: Callable[[Tensor], bool]
) -> Iterator[_Piece]:
    """Return pieces of at most CHUNK elements.

    A larger parameter is cut if its elements are contiguous, unless it is `whole`.
    """
    run = _Piece(0, 0, [], [], None)
    for param, grad in zip(params, grads, strict=True):
        start = int(grad.storage_offset()) - int(buffer.storage_offset())
        stop = start + grad.numel()
        if run.params and stop - run.start > CHUNK:
            yield run
            run = _Piece(start, start, [], [], None)
        if grad.numel() > CHUNK and grad.is_contiguous() and not whole(param):
            for first in range(start, stop, CHUNK):
                yield _Piece(first, min(first + CHUNK, stop), [param], [grad], first - start)
            run = _Piece(stop, stop, [], [], None)
            continue
        run = run._replace(stop=stop, params=[*run.params, param], grads=[*run.grads, grad])
    if run.params:
        yield run
