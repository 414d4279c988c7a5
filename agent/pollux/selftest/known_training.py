"""A training whose weights are known, however its batch is divided.

The batch is the whole data set. So each optimizer step has one gradient, whatever ranks share it, in whatever order,
and plain torch in one process gives the right weights.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import pollux

EXAMPLES = 840
"""A multiple of 1 to 8 ranks."""


class Network(nn.Module):
    """A perceptron with one hidden layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def examples() -> TensorDataset:
    """Return inputs [EXAMPLES, 16] and targets [EXAMPLES, 1]."""
    x = torch.randn(EXAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def weights_of(model: nn.Module) -> Tensor:
    """Return all parameters as one vector on the host; of shards, on all ranks alike."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole]).double().cpu()


def error_of(model: nn.Module, steps: int, device: torch.device) -> float:
    """Return the relative distance of the weights from those of plain torch after `steps` steps."""
    right = Network().to(device)
    optimizer = optimizer_of(right)
    x, y = (tensor.to(device) for tensor in examples().tensors)
    for _ in range(steps):
        loss = mse_loss(right(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    expected = weights_of(right)
    return float((weights_of(model) - expected).norm() / expected.norm())


def train(
    steps: int,
    device: torch.device,
    *,
    model: nn.Module | None = None,
    sharded: bool = False,
    folder: Path | None = None,
    scaler: torch.amp.GradScaler | None = None,
    loss_factor: Callable[[pollux.Job], float] | None = None,
    after_step: Callable[[pollux.Job], bool] | None = None,
) -> pollux.Job:
    """Train by `pollux.attach` until optimizer step `steps`, or until `after_step` returns True.

    Args:
        model: another one than `Network`, with the same parameters.
        sharded: under fully_shard (FSDP2).
        folder: of the checkpoints.
        loss_factor: on the loss of the pass at hand.
    """
    model = (model or Network()).to(device)
    if sharded:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        fully_shard(model)
    optimizer = optimizer_of(model)
    job = pollux.attach(model, optimizer, scaler=scaler, adaptive=False, checkpoint_dir=folder)
    loader = job.loader(examples(), EXAMPLES)
    for _ in job.epochs(steps):
        for x, y in loader:
            factor = 1.0 if loss_factor is None else loss_factor(job)
            job.step(lambda x=x, y=y, f=factor: f * mse_loss(job.model(x.to(device)), y.to(device)))  # type: ignore[misc]
            if after_step is not None and after_step(job):
                job.close()
                return job
    job.close()
    return job
