"""Squared norms of DDP's flat gradient buckets, in a few kernels each.

A step measures each bucket twice: as this rank's own gradient and as the mean. The preconditioner does not change in
between, so it is laid out once along the bucket's elements and kept for both, as far as the workspace allows. Beyond
the workspace, and where the optimizer treats the bucket's parameters differently, `GradientNorms.of` measures the
bucket in chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pollux.noise.precondition import CHUNK, GradientNorms, floor
from pollux.ranks.torch_internals import foreach_copy_, foreach_norm

KEPT = 2 * CHUNK
"""Elements of preconditioners kept at once: 16 MiB of float32, beside a product of at most CHUNK elements."""

Measure = Callable[[Tensor], Tensor]
"""Squared norm [groups] of a buffer laid out like the bucket; no host synchronisation."""


class BucketNorms:
    """Prepares the measurements of the buckets of a step."""

    def __init__(self, norms: GradientNorms) -> None:
        self._norms = norms
        self._kept = 0

    def begin(self) -> None:
        """Begin a step: discard the preconditioners of the last one."""
        self._kept = 0

    def measure(self, buffer: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor]) -> Measure:
        """Return the measurement for a bucket; `grads` are views of `buffer`."""
        norms = self._norms
        groups = [norms.group_of.get(p, -1) for p in params]
        if buffer.dtype == torch.float32 and -1 not in groups:
            if not norms.preconditioned and norms.groups == 1:
                return lambda found: torch.dot(found, found).reshape(1)
            fits = buffer.numel() <= CHUNK and self._kept + buffer.numel() <= KEPT
            weights = self._weights(buffer, params, grads, groups) if norms.preconditioned and fits else None
            if weights is not None:
                self._kept += buffer.numel()
                if norms.groups == 1:
                    return lambda found: _squared(found * weights).reshape(1)
                index = torch.tensor(groups, device=buffer.device)
                return lambda found: _by_group(_like(found * weights, buffer, grads), index, norms.groups)
        return lambda found: norms.of(params, _like(found, buffer, grads))

    def _weights(
        self, buffer: Tensor, params: Sequence[Tensor], grads: Sequence[Tensor], groups: Sequence[int]
    ) -> Tensor | None:
        """Return the preconditioner along the buffer; None if rules differ."""
        if any(map(self._norms.turned, params)):
            return None
        moments = [m for m in map(self._norms.second_moment, params) if m is not None]
        if len(moments) < len(params):
            return None
        rules = {self._norms.step_rule(group) for group in set(groups)}
        if len(rules) > 1:
            return None
        rule = rules.pop()
        weights = torch.empty_like(buffer)
        roots = _like(weights, buffer, grads)
        foreach_copy_(roots, moments)
        weights.sqrt_()
        floor(roots, rule)
        return weights.div_(rule.corrected).add_(rule.eps).reciprocal_()


def _like(found: Tensor, buffer: Tensor, grads: Sequence[Tensor]) -> list[Tensor]:
    """Return views of `found` at the places of `grads` in `buffer`."""
    shift = found.storage_offset() - buffer.storage_offset()
    return [found.as_strided(g.shape, g.stride(), g.storage_offset() + shift) for g in grads]


def _squared(found: Tensor) -> Tensor:
    return torch.dot(found, found)


def _by_group(parts: list[Tensor], index: Tensor, groups: int) -> Tensor:
    norms = torch.stack(list(foreach_norm(parts, 2)))
    return torch.zeros(groups, device=norms.device).index_add_(0, index, norms * norms)
