"""Trainings stop and resume from checkpoints on other numbers of ranks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from pollux import attach
from pollux.errors import CheckpointError
from pollux.goodput import BatchChoice
from pollux.ranks.node_memory import NodeMemory, hand_on
from tests.unit.agent.regression import EXAMPLES, attached, data, network, train_step


def stop(directory: str, drain_at: int | None) -> tuple[int, int, list[int], Tensor, int]:
    """Train until a drain that is ordered after so many steps, or to the end.

    Returns the step, samples counted, the numbers of those that this rank used, the weights, and the schedule's step.
    """
    os.environ["POLLUX_EXCHANGE_INTERVAL"] = "0"  # the ranks agree after every step, however fast it was
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = LambdaLR(optimizer, lambda n: 0.999**n)
    job = attach(model, optimizer, scheduler, adaptive=False, checkpoint_dir=directory)
    loader = job.loader(data(), 24, per_gpu=(1, 24))
    drained = threading.Event()
    job.coordinator.drains.wait_for_end = drained.set  # type: ignore[method-assign]
    first = job.progress.optimizer_steps
    used: list[int] = []
    ids: list[int] = []
    for _ in job.epochs(6, statistical=True):
        for x, y, batch_ids in loader:
            if 7 in job.coordinator.drains.followed:
                break
            used, ids = used + ids, batch_ids.tolist() if loader.data.local_samples else []
            train_step(job, x, y)
            if job.sync_gradients:
                scheduler.step()
            if job.is_main and job.progress.optimizer_steps == drain_at:
                job.coordinator.drains.order(7)
        if 7 in job.coordinator.drains.followed:
            break
    used += ids
    if job.is_main and drain_at is not None:
        assert drained.is_set()
    step = job.progress.optimizer_steps
    assert step > first
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    return step, job.progress.samples, used, weights, scheduler.last_epoch


def test_all_ranks_stop_after_the_same_step_and_resume_elsewhere(
    ranks: Any, tmp_path: Path, capfd: Any
) -> None:
    """1 -> 4 -> 2 ranks, drained twice in mid-epoch, match a whole run.

    The weights are those of an undisturbed run. No example is lost or repeated.
    """
    env = {"POLLUX_DRAIN_WAIT": "0"}
    [undisturbed] = ranks(1, stop, str(tmp_path / "whole"), None, env=env)
    here = str(tmp_path / "moved")
    used: list[int] = []
    samples = 0
    for size, drain_at in ((1, 12), (4, 31), (2, None)):
        results = ranks(size, stop, here, drain_at, env=env)
        assert len({r[0] for r in results}) == 1, "ranks stopped at different steps"
        assert all(r[1] == results[0][1] for r in results)
        assert all(torch.equal(r[3], results[0][3]) for r in results)
        used += [i for r in results for i in r[2]]
        assert results[0][1] > samples
        samples = results[0][1]
        assert len(used) == samples, "an example was used and not counted, or counted and not used"
    assert samples == undisturbed[1] == 6 * EXAMPLES
    assert torch.bincount(torch.tensor(used), minlength=EXAMPLES).eq(6).all()
    assert results[0][4] == undisturbed[4], "the scheduler went on where it was"
    torch.testing.assert_close(results[0][3], undisturbed[3], rtol=1e-4, atol=1e-5)
    assert capfd.readouterr().err.count("polluxd moves this job through Slurm's queue") == 2, "once per drain"


def adapt_and_finish(directory: str, epochs: int) -> tuple[int | None, int, bool]:
    """Train to the end.

    Return (batch size in the checkpoint, batch size at the end, whether a throughput model was known at the start).
    """
    job = attached(0.01, adaptive=True, measuring={"every": 1}, checkpoint_dir=directory)
    loader = job.loader(data(), 12, max_batch_size=96, per_gpu=(1, 48))
    known = job.training.advisor is None or job.params is not None
    last = job.coordinator.checkpointer.last_attempt
    carried = last.batch_size if last is not None else None
    for epoch in job.epochs(epochs, statistical=True):
        for x, y, _ids in loader:
            train_step(job, x, y)
        if job.training.advisor is not None and epoch == 1:
            job.training.advisor.close()
            job.training.advisor.advise()  # a fit for the checkpoint to carry
            job.training.advisor.proposal = BatchChoice(12, 3)
    return carried, job.batch_size, known


def test_a_restart_knows_the_batch_size_and_the_throughput_model(ranks: Any, tmp_path: Path) -> None:
    assert ranks(1, adapt_and_finish, str(tmp_path), 6) == [(None, 48, False)]
    for carried, _, known in ranks(2, adapt_and_finish, str(tmp_path), 7):
        assert carried == 48
        assert known


def test_periodic_checkpoints_are_written_beside_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_CHECKPOINT_INTERVAL", "0.02")
    job = attached(0.01, checkpoint_dir=tmp_path)
    loader = job.loader(data(), 16)
    steps, deadline = [], time.monotonic() + 60
    for _ in job.epochs(10**6, statistical=True):
        for x, y, _ids in loader:
            train_step(job, x, y)
            time.sleep(0.001)
            if job.coordinator.checkpointer.saved is not None:
                steps.append(job.coordinator.checkpointer.saved)
        if len(set(steps)) >= 3 or time.monotonic() > deadline:
            break
    job.close()
    assert len(set(steps)) >= 3
    again = network()
    resumed = attach(again, torch.optim.SGD(again.parameters(), lr=0.01), checkpoint_dir=tmp_path)
    assert resumed.progress.optimizer_steps >= steps[-1]
    resumed.close()


def shared_or_not(directory: str) -> str:
    """Attach with a checkpoint that only rank 0 can see."""
    model = network()
    mine = directory if os.environ["RANK"] == "0" else directory + "-elsewhere"
    try:
        attach(model, torch.optim.SGD(model.parameters(), lr=0.01), checkpoint_dir=mine)
    except CheckpointError as error:
        return str(error)
    return "attached"


def test_ranks_that_see_different_checkpoints_say_so(ranks: Any, tmp_path: Path) -> None:
    adapt_and_finish(str(tmp_path), 1)
    for message in ranks(2, shared_or_not, str(tmp_path)):
        assert "file system that all nodes share" in message


@pytest.mark.one_process
def test_a_second_training_of_a_script_begins_anew(request: pytest.FixtureRequest) -> None:
    """A script may train several seeds, one after another: the node's memory holds copies of the first training."""
    request.addfinalizer(lambda: hand_on(None))
    hand_on(NodeMemory(1))
    steps = []
    for _ in range(2):
        model = torch.nn.Linear(2, 1)
        job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
        steps.append(job.progress.optimizer_steps)
        loader = job.loader(torch.utils.data.TensorDataset(torch.zeros(64, 2)), 8)
        for _ in job.epochs(1):
            for (x,) in loader:
                job.step(lambda x=x, job=job: job.model(x).sum())
        assert job.coordinator.checkpointer.memory.copies
        job.close()
    assert steps == [0, 0]
