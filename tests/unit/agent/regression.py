"""A regression that trains in a moment, for tests of whole trainings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import Job

EXAMPLES = 203
"""Prime to every batch size of the tests: passes end in uneven tails."""


def data(length: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    y = x @ torch.randn(6, 1, generator=generator) + 0.3 * torch.randn(length, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(length))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train_step(job: Job, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    with job.micro_batch():
        loss = mse_loss(job.model(x), y)
        job.backward(loss)
    if job.sync_gradients:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
