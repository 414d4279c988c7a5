"""A regression that trains in a moment, for tests of whole trainings."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import Job, attach

EXAMPLES = 203
"""Prime to every batch size of the tests: passes end in uneven tails."""


def data(length: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    y = x @ torch.randn(6, 1, generator=generator) + 0.3 * torch.randn(length, 1, generator=generator)
    return TensorDataset(x, y, torch.arange(length))


def sums(length: int = 64) -> TensorDataset:
    """Examples whose target is the sum of their inputs."""
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, x.sum(1, keepdim=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def attached(rate: float = 0.05, **options: Any) -> Job:
    """Attach the network and a plain SGD. The batch size stays, unless the options of `attach` say otherwise."""
    model = network()
    return attach(model, torch.optim.SGD(model.parameters(), rate), **{"adaptive": False, **options})


def train_step(job: Job, x: Tensor, y: Tensor) -> float:
    """Make one pass, and the optimizer step after a step's last pass."""
    with job.micro_batch():
        loss = mse_loss(job.model(x), y)
        job.backward(loss)
    update(job)
    return float(loss.detach())


def update(job: Job) -> None:
    """Make the optimizer step after a step's last pass."""
    if job.sync_gradients:
        job.optimizer.step()
        job.optimizer.zero_grad()


def train(job: Job, loader: Iterable[Any], epochs: float, **options: Any) -> None:
    for _ in job.epochs(epochs, **options):
        for x, y, *_ in loader:
            train_step(job, x, y)


def logged() -> list[str]:
    """Return the list of the agent's messages from now on, in this process."""
    lines: list[str] = []
    logging.getLogger("pollux").addFilter(lambda record: lines.append(record.getMessage()) is None)
    return lines
