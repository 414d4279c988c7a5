"""A flat bucket of gradients, and optimizers with state."""

from __future__ import annotations

from typing import Any

import torch

SHAPES = [(4, 3), (7,), (2, 3, 2, 2), (1,), (11, 5)]


def bucket() -> tuple[list[torch.nn.Parameter], torch.Tensor, list[torch.Tensor]]:
    """Return parameters and gradients that lie in one buffer in turn.

    The buffer begins in the middle of its storage.
    """
    generator = torch.Generator().manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    params[2].data = params[2].data.contiguous(memory_format=torch.channels_last)
    buffer = torch.randn(5 + sum(p.numel() for p in params), generator=generator)[5:]
    grads, start = [], buffer.storage_offset()
    for p in params:
        grads.append(buffer.as_strided(p.shape, p.stride(), start))
        start += p.numel()
    return params, buffer, grads


def stepped(kind: Any, groups: Any, **options: Any) -> torch.optim.Optimizer:
    """Second moments; some elements and one parameter never had a gradient."""
    optimizer: torch.optim.Optimizer = kind(groups, lr=0.1, **options)
    generator = torch.Generator().manual_seed(4)
    for _ in range(6):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
                p.grad[..., 0] = 0.0
        optimizer.step()
    return optimizer
