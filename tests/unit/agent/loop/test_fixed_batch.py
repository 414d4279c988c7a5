"""A fixed batch at numbers of ranks that do not divide it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from pollux import attach

EPOCHS, M0 = 4, 16


def schedule_of(kind: str, length: int, adaptive: bool, step: bool) -> tuple[int, int, float]:
    """Train over exactly the steps that plain training has on one GPU.

    Return the batch size, the scheduler's calls and its last learning rate.
    """
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total = EPOCHS * -(-length // M0)
    scheduler: Any = (
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total)
        if kind == "one-cycle"
        else torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    )
    job = attach(model, optimizer, scheduler, adaptive=adaptive)
    loader = job.loader(TensorDataset(torch.randn(length, 4)), M0, per_gpu=(1, 16))

    def loss(x: Tensor) -> Tensor:
        squared: Tensor = job.model(x).pow(2).mean()
        return squared

    for _ in job.epochs(EPOCHS, statistical=True):
        for (x,) in loader:
            if step:
                job.step(lambda x=x: loss(x))
                continue
            with job.micro_batch():
                job.backward(loss(x))
            if job.sync_gradients:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
    size = job.batch_size
    job.close()
    return size, scheduler.last_epoch, scheduler.get_last_lr()[0]


@pytest.mark.parametrize(
    ("kind", "length", "adaptive", "step"),
    [
        ("one-cycle", 320, False, False),
        ("cosine", 320, True, False),
        ("one-cycle", 333, False, True),
        ("one-cycle", 333, True, False),
    ],
)
def test_three_ranks_round_the_batch_up_and_no_schedule_runs_past_its_end(
    ranks: Any, kind: str, length: int, adaptive: bool, step: bool
) -> None:
    total = EPOCHS * -(-length // M0)
    for size, calls, rate in ranks(3, schedule_of, kind, length, adaptive, step):
        assert size == 18
        assert total - EPOCHS <= calls <= total
        assert rate < 0.001
