"""Optimizers with state, and flat buckets of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pollux.noise.precondition import GradientNorms

SHAPES = [(4, 3), (7,), (2, 3, 2, 2), (1,), (11, 5)]


def trained(kind: Any, split: bool, **options: Any) -> tuple[list[Parameter], GradientNorms]:
    """Return parameters with gradients and the norms of a used optimizer.

    The optimizer has stepped 6 times. Some elements never had a gradient.
    """
    generator = torch.Generator().manual_seed(3)
    params = [Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    groups: Any = [{"params": params[3:]}, {"params": params[:3], "lr": 0.2}] if split else params
    optimizer = kind(groups, lr=0.1, **options)
    for _ in range(6):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
            p.grad[..., 0] = 0.0
        optimizer.step()
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)
    norms = GradientNorms(optimizer)
    norms.steps = 6
    return params, norms


def beyond_the_workspace(kind: Any, largest: tuple[int, int]) -> tuple[list[Parameter], GradientNorms]:
    """Return parameters with gradients that take more than 32 MiB; `largest` alone is beyond one chunk."""
    params = [Parameter(torch.zeros(shape)) for shape in [(1000, 1000)] * 9 + [largest, (300,)]]
    assert sum(p.numel() for p in params) * 4 > 1.3 * (32 << 20)
    optimizer = kind(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    norms = GradientNorms(optimizer)
    norms.steps = 6
    return params, norms


class Bucket:
    """What DDP hands to a communication hook: gradients in turn, in a buffer in the middle of its storage."""

    def __init__(self, params: Sequence[Parameter], *, last: bool = True) -> None:
        self._params, self._last = list(params), last
        self._buffer = torch.empty(5 + sum(p.numel() for p in params))[5:]
        self._grads, start = [], 5
        for p in params:
            assert p.grad is not None
            self._grads.append(self._buffer.as_strided(p.shape, p.stride(), start).copy_(p.grad))
            start += p.numel()

    def buffer(self) -> Tensor:
        return self._buffer

    def parameters(self) -> list[Parameter]:
        return self._params

    def gradients(self) -> list[Tensor]:
        return self._grads

    def is_last(self) -> bool:
        return self._last
