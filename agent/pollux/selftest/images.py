"""A small convolutional network on drawn images, with a fixed and with an adapted batch."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import pollux

Floats = NDArray[np.float64]
M0, MOST, EPOCHS = 32, 512, 4
TRAINED, HELD_OUT = 2048, 2048
PASS_S = 0.02
"""Least time of a pass: the agent needs seconds to try larger batches, however quick the device is."""


class PaidByThePass:
    """Step times that a pass pays and an example hardly does: the batch then grows as the noise scale allows."""

    def fit(self, rows: Any) -> None: ...

    def step_time(self, nodes: Floats, gpus: Floats, local_batch: Floats, accumulation: Floats) -> Floats:
        """Return seconds [n] of steps."""
        seconds: Floats = (1 + accumulation) * (1.0 + 1e-4 * local_batch)
        return seconds


def drawn(count: int, generator: torch.Generator, patterns: Tensor) -> TensorDataset:
    """Return images [count, 1, 12, 12]: a class's pattern, shifted, among noise."""
    y = torch.randint(len(patterns), (count,), generator=generator)
    shifts = torch.randint(-2, 3, (count, 2), generator=generator)
    moved = [patterns[c].roll((int(a), int(b)), (0, 1)) for c, (a, b) in zip(y.tolist(), shifts, strict=True)]
    x = torch.stack(moved)[:, None] + torch.randn(count, 1, 12, 12, generator=generator)
    return TensorDataset(x, y)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )


def train(device: torch.device, *, adaptive: bool) -> dict[str, Any]:
    """Return the held-out accuracy, the steps, and the largest batch."""
    generator = torch.Generator().manual_seed(5)
    patterns = torch.randn(10, 12, 12, generator=generator)
    data, test = (drawn(count, generator, patterns) for count in (TRAINED, HELD_OUT))
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    job = pollux.attach(model, optimizer, adaptive=adaptive, measuring={"step_time": PaidByThePass()})
    loader = job.loader(data, M0, max_batch_size=MOST, per_gpu=(4, MOST))
    largest = M0
    for _ in job.epochs(EPOCHS, statistical=True):
        for x, y in loader:
            time.sleep(PASS_S)
            job.step(lambda x=x, y=y: cross_entropy(job.model(x.to(device)), y.to(device)))  # type: ignore[misc]
            largest = max(largest, job.batch_size)
    job.close()
    return {
        "rank": job.rank,
        "ranks": job.world.size,
        "steps": job.progress.optimizer_steps,
        "accuracy": _accuracy(model, test, device),
        "largest_batch": largest,
    }


@torch.no_grad()
def _accuracy(model: nn.Module, test: TensorDataset, device: torch.device) -> float:
    model.eval()
    x, y = test.tensors
    return float((model(x.to(device)).argmax(1) == y.to(device)).float().mean())
