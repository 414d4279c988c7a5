"""A loop that is left early, and drains where no optimizer step is taken."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from pollux import Job, attach
from pollux.ranks.control import Decision
from tests.unit.agent.answering import connected, heard
from tests.unit.agent.regression import sums as data


def start(directory: Path | str, **options: Any) -> tuple[Job, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=False, checkpoint_dir=directory, **options)
    return job, job.loader(data(), 8, per_gpu=(1, 8))


def step(job: Job, x: torch.Tensor, y: torch.Tensor) -> None:
    job.backward(mse_loss(job.model(x), y))
    job.optimizer.step()
    job.optimizer.zero_grad()


def leave(job: Job, loader: Any, at: int) -> None:
    for _ in job.epochs(5, statistical=True):
        for x, y in loader:
            step(job, x, y)
            if job.progress.optimizer_steps == at:
                break
        if job.progress.optimizer_steps >= at:
            break


def left(directory: str) -> tuple[int, int | None]:
    job, loader = start(directory)
    leave(job, loader, 11)
    job.close()
    return job.progress.optimizer_steps, job.coordinator.checkpointer.saved


def test_closing_after_a_break_keeps_what_was_trained(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2, left, str(tmp_path))
    steps = results[0][0]
    assert [result[0] for result in results] == [steps, steps]
    assert results[0][1] == steps >= 11
    again, *_ = start(tmp_path)
    assert again.progress.optimizer_steps == steps
    assert not again.progress.finished
    again.close()


def test_closing_in_an_error_writes_nothing(tmp_path: Path) -> None:
    job, loader = start(tmp_path)

    def script() -> None:
        try:
            leave(job, loader, 3)
            raise ZeroDivisionError
        finally:
            job.close()

    with pytest.raises(ZeroDivisionError):
        script()
    assert not list(tmp_path.glob("checkpoint-*"))


def test_after_a_break_an_order_to_drain_is_answered_by_a_checkpoint(tmp_path: Path) -> None:
    job, loader = start(tmp_path)
    line = connected(job)
    leave(job, loader, 11)
    job.coordinator.drains.order(4)
    steps = job.progress.optimizer_steps
    assert heard(line, 1) == [(4, steps)]
    assert job.coordinator.checkpointer.saved == steps
    # A loop that goes on answers at its own steps again.
    leave(job, loader, steps + 3)
    job.coordinator.drains.order(5)
    assert heard(line, 2) == [(4, steps), (5, job.progress.optimizer_steps)]
    job.close()


def test_an_order_under_way_at_a_break_is_answered_once(tmp_path: Path) -> None:
    job, loader = start(tmp_path)
    line = connected(job)
    for _ in job.epochs(5, statistical=True):
        for x, y in loader:
            step(job, x, y)
            if job.progress.optimizer_steps == 3:
                break
        job.coordinator.exchange.send(Decision(move=6))
        break
    heard(line, 1)
    job.close()
    deadline = time.monotonic() + 0.2  # a second answer would come at once
    while time.monotonic() < deadline and len(line.heard) < 2:
        time.sleep(0.01)
    assert [number for number, _ in line.heard] == [6]


def evaluate(directory: str) -> tuple[int, bool, list[tuple[int, int]]]:
    """Receive a drain order in a long evaluation, then train on.

    Training goes on here because nobody ends the job.
    """
    job, loader = start(directory)
    line = connected(job)
    for x, y in loader:
        step(job, x, y)
        if job.progress.optimizer_steps == 4:
            break
    if job.is_main:
        job.coordinator.drains.order(7)
    for _ in range(3):
        job.poll()
    found = list(line.heard)
    drained = 7 in job.coordinator.drains.followed
    for x, y in loader:
        step(job, x, y)
    job.close()
    return job.progress.optimizer_steps, drained, found


def test_an_order_is_heard_in_an_evaluation(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, evaluate, str(tmp_path), env={"POLLUX_DRAIN_WAIT": "0"})
    assert first[1]
    assert second[1]
    assert len(first[2]) == 1
    assert first[2][0][0] == 7
    assert first[0] == second[0] == 8


def test_an_order_is_heard_while_amp_skips_every_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    job, loader = start(tmp_path, scaler=scaler)
    line = connected(job)
    for n, (x, y) in enumerate(loader):
        if n == 2:
            job.coordinator.drains.order(8)
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y) * float("inf"))
        if job.sync_gradients:
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
        if n == 6:
            break
    assert job.progress.optimizer_steps == 0
    assert line.heard == [(8, 0)]
    job.close()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_amp_skips_inside_a_fused_optimizer_earns_nothing(tmp_path: Path, fused: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    job = attach(model, optimizer, scaler=scaler, adaptive=False)
    for n, (x, y) in enumerate(job.loader(data(), 8, per_gpu=(8, 8))):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y) * (float("inf") if n in (1, 4) else 1.0))
        if job.sync_gradients:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert n + 1 == 10, "an epoch of 8 steps took two batches more, for those that were skipped"
    assert job.progress.optimizer_steps == job.training.models[0].meter.norms.steps == 8
    job.close()
