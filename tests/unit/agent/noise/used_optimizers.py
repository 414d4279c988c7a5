"""Optimizers with state, and gradients of their parameters."""

from __future__ import annotations

from typing import Any

import torch
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
