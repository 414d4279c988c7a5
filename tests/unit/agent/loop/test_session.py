"""The training loop: progress, learning rate, and batch sizes.

Real ranks agree on the batch sizes.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import LambdaLR

from pollux import attach
from pollux.errors import BatchError, PolluxAgentError
from pollux.goodput import BatchChoice
from tests.unit.agent.regression import EXAMPLES, attached, data, network, train_step


def test_a_run_at_its_own_batch_size_is_plain_training() -> None:
    def run(plain: bool) -> list[Tensor]:
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scheduler = LambdaLR(optimizer, lambda n: 0.98**n)
        job = attach(model, optimizer, scheduler, adaptive=False)
        loader = job.loader(data(), 16)
        if plain:
            loader_again: Any = list(loader.data)
            loader_again += list(loader.data)
            for x, y, _ids in loader_again:
                mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        else:
            for _ in job.epochs(2, statistical=True):
                for x, y, _ids in loader:
                    train_step(job, x, y)
                    if job.sync_gradients:
                        scheduler.step()
            assert job.progress.samples == 2 * EXAMPLES
            assert job.progress.steps == 2 * EXAMPLES / 16
        job.close()
        return [p.detach().clone() for p in model.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_loop_without_micro_batch_works() -> None:
    job = attached()
    loader = job.loader(data(), 16)
    seen: list[int] = []
    for _ in job.epochs(1, statistical=True):
        for x, y, ids in loader:
            mse_loss(job.model(x), y).backward()
            job.optimizer.step()
            job.optimizer.zero_grad()
            seen += ids.tolist()
    assert sorted(seen) == list(range(EXAMPLES))
    job.close()


def test_leaving_an_epoch_early_keeps_the_place() -> None:
    job = attached(adaptive=True)
    loader = job.loader(data(), 16, max_batch_size=16)
    seen: list[int] = []
    for _ in job.epochs(3, statistical=True):
        for n, (x, y, ids) in enumerate(loader):
            # Measured steps are cut in two: some breaks come half-way through one.
            train_step(job, x, y)
            seen += ids.tolist()
            if n == 4:
                break
    assert len(set(seen)) == len(seen) >= 3 * 5 * 8
    assert len(seen) - 8 <= job.progress.samples <= len(seen)
    job.close()


def test_bad_batch_sizes_are_named() -> None:
    job = attached(0.1, adaptive=None)
    with pytest.raises(BatchError, match="below the initial one"):
        job.loader(data(), 64, max_batch_size=32)
    with pytest.raises(BatchError, match="from 1, got 0"):
        job.loader(data(), 64, max_batch_size=0)
    with pytest.raises(PolluxAgentError, match="before the loop"):
        next(job.epochs(1, statistical=True))
    job.close()


def test_a_step_that_amp_skips_earns_nothing_and_uses_its_batch() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    job = attached(scaler=scaler, measuring={"every": 1})
    loader = job.loader(data(), 28)
    seen: list[int] = []
    steps = 0
    for n, (x, y, ids) in enumerate(loader):
        with job.micro_batch():
            job.backward(mse_loss(job.model(x), y) * (float("inf") if n == 2 else 1.0))
        if job.sync_gradients:
            scaler.step(job.optimizer)
            scaler.update()
            job.optimizer.zero_grad()
            steps += 1
        seen += ids.tolist()
        if steps == 7:
            break
    assert len(set(seen)) == len(seen) == 7 * 28
    assert job.progress.optimizer_steps == 6
    assert job.progress.samples == 6 * 28
    assert job.training.models[0].averages.skipped <= 1
    assert all(bool(p.isfinite().all()) for p in job.module.parameters())
    job.close()


def follow(changes: dict[int, tuple[int, int]]) -> list[tuple[int, int, int, float, list[int]]]:
    """Train two passes while rank 0 proposes batch sizes at given steps.

    Return what this rank did at each step.
    """
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"
    job = attached(0.01, adaptive=True, measuring={"every": 1})
    loader = job.loader(data(), 12, max_batch_size=60, per_gpu=(1, 12))
    if job.training.advisor is not None:
        job.training.advisor.close()  # the proposals below are all that there are
    log: list[tuple[int, int, int, float, list[int]]] = []
    ids: list[int] = []
    for _ in job.epochs(2):
        for x, y, batch_ids in loader:
            with job.micro_batch():
                job.backward(mse_loss(job.model(x), y))
            ids += batch_ids.tolist() if loader.data.local_samples else []
            if job.sync_gradients:
                log.append(
                    (
                        job.progress.optimizer_steps,
                        job.local_batch,
                        job.accumulation,
                        sum(job.lr_factors),
                        ids,
                    )
                )
                ids = []
                job.optimizer.step()
                job.optimizer.zero_grad()
            change = changes.get(job.progress.optimizer_steps)
            if job.training.advisor is not None and change is not None:
                job.training.advisor.proposal = BatchChoice(*change)
    job.close()
    torch.distributed.barrier()
    return log


def test_a_batch_change_is_agreed_on_all_ranks(ranks: Any) -> None:
    logs = ranks(3, follow, {9: (9, 1), 11: (4, 2), 13: (5, 0)})
    decisions = [[entry[:4] for entry in log] for log in logs]
    assert decisions[0] == decisions[1] == decisions[2]
    sizes = [entry[1:3] for entry in decisions[0]]
    assert sizes[0] == (4, 0)
    for change in [(9, 1), (4, 2), (5, 0)]:
        assert change in sizes
    # The larger batch is taken at a higher learning rate, once a noise scale is known.
    assert any(entry[3] > 1.0 for entry in decisions[0])
    counts = torch.zeros(EXAMPLES)
    for log in logs:
        for entry in log:
            counts += torch.bincount(torch.tensor(entry[4], dtype=torch.int64), minlength=EXAMPLES)
    assert counts.eq(2).all(), "two passes show every example twice"
