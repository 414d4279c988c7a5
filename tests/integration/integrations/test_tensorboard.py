"""TensorBoard scalars of a training that dies and resumes.

The training ends without warning and resumes from its checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

pytest.importorskip("tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.integrations.tensorboard import Board


def train(checkpoints: Path, to: Any, *, save_at: int, die_at: int | None) -> int:
    """Train, and return the number of optimizer steps made by the end.

    An attempt that dies (at step `die_at`) leaves the checkpoint of step `save_at`.
    """
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(96, 4, generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, checkpoint_dir=checkpoints, adaptive=True, measuring={"every": 1})
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 8, max_batch_size=8)
    board = Board(job, to, every=2)
    for _ in job.epochs(4, statistical=True):
        for inputs, targets in loader:
            steps = job.progress.optimizer_steps
            if steps == save_at and die_at is not None:
                job.coordinator.save(durable=True)
            if steps == die_at:
                board.close()
                return steps
            with job.micro_batch():
                job.backward(mse_loss(job.model(inputs), targets))
            if job.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
    board.close()
    job.close()
    return job.progress.optimizer_steps


def test_a_curve_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    died = train(tmp_path / "checkpoints", tmp_path / "runs", save_at=10, die_at=21)
    ended = train(tmp_path / "checkpoints", tmp_path / "runs", save_at=10, die_at=None)
    assert ended > died
    events = EventAccumulator(str(tmp_path / "runs"))
    events.Reload()
    steps = [event.step for event in events.Scalars("pollux/progress")]
    assert steps == sorted(set(steps)), "nothing twice"
    assert steps[-1] == ended - ended % 2
    noise = events.Scalars("pollux/noise_scale")
    assert noise
    assert all(event.value > 0 for event in noise)


def test_a_writer_of_the_users_own_stays_open(tmp_path: Path) -> None:
    class Writer:
        def __init__(self) -> None:
            self.names: set[str] = set()

        def add_scalar(self, name: str, value: float, step: int) -> None:
            self.names.add(name)

    writer = Writer()
    train(tmp_path, writer, save_at=0, die_at=None)
    assert {"pollux/batch_size", "pollux/gain", "pollux/goodput", "pollux/lr_factor"} <= writer.names


def test_every_is_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(PolluxAgentError, match="every=0"):
        Board(None, tmp_path, every=0)  # type: ignore[arg-type]
