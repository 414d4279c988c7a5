"""The ends of passes, of trainings, of schedules and of data sets."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from pollux import Job, attach
from pollux.goodput import BatchChoice, NoiseScale
from pollux.learning_rate.schedule import ScaledSchedule
from pollux.ranks.control import Decision
from pollux.tuning.measurements import Configuration
from tests.unit.agent.answering import connected, heard
from tests.unit.agent.regression import train
from tests.unit.agent.regression import train_step as step


def data(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(length, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True) + torch.randn(length, 1, generator=generator))


def start(**options: Any) -> Job:
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    return attach(model, torch.optim.SGD(model.parameters(), lr=0.01), **options)


# -- of a pass ------------------------------------------------------------------------------------------------


def test_a_short_step_takes_the_learning_rate_of_its_own_size() -> None:
    job = start(adaptive=True, scaling=lambda scale, noise: scale)
    loader = job.loader(data(34), 8, max_batch_size=32, per_gpu=(1, 32))
    job.training.choice = BatchChoice(32, 0)
    factors = []
    for _ in job.epochs(1):
        for x, y in loader:
            factors.append((len(x), *job.lr_factors))
            step(job, x, y)
    job.close()
    # Two examples at four times the rate that the user chose for eight would be a leap in a random direction.
    assert factors == [(32, 4.0), (2,)]


def test_a_step_is_worth_what_was_said_before_it_was_taken() -> None:
    job = start(adaptive=True, measuring={"every": 1000})
    loader = job.loader(data(106), 8, max_batch_size=32, per_gpu=(1, 32))
    job.training.choice = BatchChoice(32, 0)
    job.training.models[0].meter.agreed = (NoiseScale(sqr=1.0, var=3.0),)
    job.training.models[0].averages.groups = lambda: None  # type: ignore[method-assign]
    said: list[float] = []
    for x, y in loader:
        if said:
            assert job.gain == said[-1]
        group = job.training.step.group
        assert group is not None
        if job.sync_gradients:  # a measured step may be cut in two
            said.append(group.samples * job.training.efficiency(group.samples) / 8)
        step(job, x, y)
    job.close()
    # AdaScale's gain at 4 times M0, and at the short step's own size.
    assert said[:4] == pytest.approx([4 / 1.75] * 3 + [4 / 3.4])
    assert job.gain == said[-1]


def test_the_report_after_a_short_step_speaks_of_whole_ones() -> None:
    job = start(adaptive=False)
    loader = job.loader(data(34), 32, per_gpu=(1, 32))
    train(job, loader, 1)
    job.profile.add(Configuration(1, 1, 32), final=[0.5])
    report = job.report()
    job.close()
    assert job.gain == pytest.approx(2 / 32)
    assert report["goodput"] == report["throughput"] > 0


def test_one_gpu_that_measures_every_step_in_two_halves_reports_its_goodput() -> None:
    job = start(adaptive=True, measuring={"every": 1})
    loader = job.loader(data(320), 32, max_batch_size=32, per_gpu=(1, 32))
    for x, y in loader:
        step(job, x, y)
    job.training.timer.pause()
    whole, half = Configuration(1, 1, 32), Configuration(1, 1, 16)
    assert job.profile.medians(whole) == (None, None), "it was never timed"
    job.profile.add(half, local=[0.2] * 99, final=[0.3] * 99)
    report = job.report()
    job.close()
    assert report["throughput"] == pytest.approx(32 / 0.5)


def test_no_batch_is_larger_than_a_pass() -> None:
    job = start(adaptive=True)
    job.loader(data(100), 16, max_batch_size=512, per_gpu=(1, 512))
    job.close()
    assert job.limits.maximum == 100


# -- of a training --------------------------------------------------------------------------------------------


def test_an_order_to_drain_under_way_at_the_end_is_answered_by_the_last_checkpoint(tmp_path: Path) -> None:
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(32), 16)
    line = connected(job)
    for _ in job.epochs(1, statistical=True):
        for x, y in loader:
            step(job, x, y)
        job.coordinator.exchange.send(Decision(move=5))
        job.coordinator.drains.order(6)
    job.close()
    assert heard(line, 2) == [(5, 2), (6, 2)]


def test_a_restart_never_begins_with_the_code_after_an_epochs_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(32), 16)
    line = connected(job)
    with contextlib.suppress(KeyboardInterrupt):
        for epoch in job.epochs(3, statistical=True):
            for x, y in loader:
                if job.progress.optimizer_steps == 0:
                    job.coordinator.drains.order(5)  # reaches the ranks at the epoch's last step
                if epoch == 1:
                    raise KeyboardInterrupt
                step(job, x, y)
            assert not line.heard
    assert heard(line, 1) == [(5, 2)]

    again = start(checkpoint_dir=tmp_path)
    loader = again.loader(data(32), 16)
    assert (again.progress.epoch, again.progress.optimizer_steps) == (1, 2)
    for _ in again.epochs(3, statistical=True):
        for x, y in loader:
            step(again, x, y)
            last = x
        del last  # a NameError, had the loop been empty
    assert again.progress.optimizer_steps == 6
    again.close()


def test_a_second_loop_is_not_drained_by_the_checkpoint_of_the_first(tmp_path: Path) -> None:
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(32), 16)
    line = connected(job)
    for epochs in (1, 2):
        for _ in job.epochs(epochs, statistical=True):
            for x, y in loader:
                step(job, x, y)
                if job.progress.optimizer_steps == 3 and epochs == 2:
                    job.coordinator.drains.order(9)
                    assert not line.heard
    job.close()
    assert job.progress.finished
    assert job.coordinator.checkpointer.saved == 4
    assert heard(line, 1) == [(9, 4)]


def test_an_attempt_with_nothing_left_to_train_answers_too(tmp_path: Path) -> None:
    for attempt in (1, 2):
        job = start(checkpoint_dir=tmp_path)
        loader = job.loader(data(32), 16)
        line = connected(job)
        for _ in job.epochs(1, statistical=True):
            assert attempt == 1
            for x, y in loader:
                step(job, x, y)
        job.coordinator.drains.order(4)
        job.close()
        assert heard(line, 1) == [(4, 2)]


def test_an_acknowledgement_that_nobody_took_does_not_bar_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_EXCHANGE_INTERVAL", "0")
    job = start(checkpoint_dir=tmp_path)
    loader = job.loader(data(640), 16)
    line = connected(job, accepts=False)
    for _ in job.epochs(1, statistical=True):
        for x, y in loader:
            step(job, x, y)
            if job.progress.optimizer_steps in (5, 20):
                job.coordinator.drains.order(3)
    job.close()
    assert [number for number, _ in heard(line, 2)] == [3, 3]


# -- of what others can hold ----------------------------------------------------------------------------------


def test_a_parameter_group_added_in_mid_training_is_trained_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=True, scaling=lambda scale, noise: scale, measuring={"every": 1})
    loader = job.loader(data(256), 8, max_batch_size=16, per_gpu=(1, 16))
    job.training.choice = BatchChoice(16, 0)
    for n, (x, y) in enumerate(loader):
        if n == 4:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        step(job, x, y)
        if n > 10:
            assert job.lr_factors == (2.0, 2.0)
            break
    job.close()
    assert n > 10


def test_a_schedule_of_a_stated_length_is_not_stepped_beyond_it() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    scaled = ScaledSchedule(schedule)
    for gain in (6.0, 6.0):  # the last step overshoots, as large ones do
        scaled.begin()
        optimizer.step()
        schedule.step()
        scaled.end(gain)
    assert schedule.last_epoch == 10
