"""What a script counts: M0 on other ranks, passes of a step, schedules of epochs."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim import lr_scheduler as kinds

from pollux import attach
from tests.unit.agent.loop.mistakes_page import on_the_page
from tests.unit.agent.regression import attached, data, logged, network

EPOCHS, M0, LENGTH = 6, 16, 192
STEPS = EPOCHS * LENGTH // M0


def schedule_of(make: Any, *, own: bool = False, epochs: int = EPOCHS) -> list[str]:
    """Train with a schedule that `attach` gets; return what the agent says of it."""
    said, model = logged(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scheduler = make(optimizer)
    job = attach(model, optimizer, scheduler, adaptive=False)
    loader = job.loader(data(LENGTH), M0)
    for _ in job.epochs(epochs):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
        if own:
            scheduler.step()
    job.close()
    return [line for line in said if "schedule of epochs" in line or "between two optimizer steps" in line]


@pytest.mark.parametrize(
    "make",
    [
        lambda o: kinds.StepLR(o, 2),
        lambda o: kinds.ExponentialLR(o, 0.9),
        lambda o: kinds.MultiStepLR(o, [3, 5]),
        lambda o: kinds.CosineAnnealingLR(o, EPOCHS),
        lambda o: kinds.CosineAnnealingLR(o, EPOCHS, eta_min=0.01),
        lambda o: kinds.CosineAnnealingWarmRestarts(o, 3),
        lambda o: kinds.OneCycleLR(o, 0.05, total_steps=EPOCHS),
        lambda o: kinds.PolynomialLR(o, EPOCHS),
        lambda o: kinds.LinearLR(o, 1.0, 0.1, EPOCHS),
        lambda o: kinds.SequentialLR(
            o, [kinds.LinearLR(o, 0.1, 1.0, 2), kinds.CosineAnnealingLR(o, EPOCHS - 2)], [2]
        ),
        lambda o: kinds.LambdaLR(o, lambda epoch: 0.1 ** (epoch // 2)),
    ],
)
def test_a_schedule_of_epochs_that_is_stepped_with_the_optimizer_is_named_once(make: Any) -> None:
    (line,) = schedule_of(make)
    assert "stepped once per optimizer step" in line
    assert on_the_page(line.partition(": it is")[0]) == line.startswith("StepLR")
    assert 'state={"schedule": scheduler}' in line


@pytest.mark.parametrize(
    "make",
    [
        lambda o: kinds.StepLR(o, 2 * LENGTH // M0),
        lambda o: kinds.CosineAnnealingLR(o, STEPS),
        lambda o: kinds.ExponentialLR(o, 0.99),
        lambda o: kinds.LinearLR(o, 0.1, 1.0, 5),
        lambda o: kinds.ConstantLR(o, 0.5, 5),
        lambda o: kinds.OneCycleLR(o, 0.05, total_steps=STEPS),
        lambda o: kinds.SequentialLR(
            o, [kinds.LinearLR(o, 0.1, 1.0, 5), kinds.CosineAnnealingLR(o, STEPS - 5)], [5]
        ),
        lambda o: kinds.LambdaLR(o, lambda step: 1 - step / STEPS),
    ],
)
def test_a_schedule_of_steps_is_not_doubted(make: Any) -> None:
    assert schedule_of(make) == []


def test_a_call_between_the_steps_beside_job_step_is_named() -> None:
    (line,) = schedule_of(lambda o: kinds.CosineAnnealingLR(o, 1000), own=True)
    assert "called between two optimizer steps" in line


@pytest.mark.parametrize(("most", "passes"), [(4, 4), (16, 1)])
def test_steps_of_several_passes_are_told_of_once(
    caplog: pytest.LogCaptureFixture, most: int, passes: int
) -> None:
    caplog.set_level(logging.INFO, "pollux")
    said, job = logged(), attached()
    loader = job.loader(data(LENGTH), M0, per_gpu=(1, most))
    bodies = 0
    for _ in job.epochs(2):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            bodies += 1
    job.close()
    assert bodies == 2 * len(loader) == passes * job.progress.optimizer_steps
    told = [line for line in said if "the loop's body runs once in each" in line]
    assert len(told) == (passes > 1)


def by_ranks(folder: str, stop: int, fixed: int = 0) -> tuple[list[float], int, int, list[str]]:
    """M0, and the length of the schedule, made of the number of ranks; return the rates and what was counted."""
    logging.getLogger("pollux").setLevel(logging.INFO)  # of this rank's process alone
    said, model = logged(), network()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    job = attach(model, optimizer, None, adaptive=False, checkpoint_dir=folder)
    size = fixed or 8 * job.world.size
    job.close()
    scheduler = kinds.CosineAnnealingLR(optimizer, 4 * math.ceil(LENGTH / size))
    job = attach(model, optimizer, scheduler, adaptive=False, checkpoint_dir=folder, name="counted")
    loader, rates = job.loader(data(LENGTH), size), []
    for _ in job.epochs(4):
        for x, y, _ in loader:
            rates.append(optimizer.param_groups[0]["lr"])
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
            if job.progress.optimizer_steps == stop:
                break
        else:
            continue
        break
    job.close()
    return rates, job.progress.optimizer_steps, job.batch_size, [line for line in said if "M0 " in line]


@pytest.mark.parametrize(("first", "then", "m0"), [(2, 1, 16), (1, 2, 8)])
def test_m0_made_of_the_number_of_ranks_stays_that_of_the_first_start(
    ranks: Any, tmp_path: Path, first: int, then: int, m0: int
) -> None:
    begun, *_ = ranks(first, by_ranks, str(tmp_path), 20)
    ended, *_ = ranks(then, by_ranks, str(tmp_path), 0)
    steps = 4 * LENGTH // m0
    plain = [0.025 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)]
    assert begun[0] + ended[0] == pytest.approx(plain, abs=1e-6)
    assert ended[1:3] == (steps, m0)
    assert any("does not depend on it" in line and f"M0 stays {m0}" in line for line in ended[3])


def test_another_m0_of_the_user_is_told_of(ranks: Any, tmp_path: Path) -> None:
    ranks(1, by_ranks, str(tmp_path), 20, 16)
    ((_, _, size, said),) = ranks(1, by_ranks, str(tmp_path), 0, 32)
    assert size == 32
    assert any("M0 was 16" in line and "is 32" in line for line in said)


def test_what_begins_again_after_a_restart_in_the_middle_of_a_pass_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for start in range(2):
        job = attached(checkpoint_dir=tmp_path)
        for _, (x, y, _) in zip(range(3 + start), job.loader(data(LENGTH), M0), strict=False):
            job.step(lambda x=x, y=y, job=job: mse_loss(job.model(x), y))  # type: ignore[misc]
        job.coordinator.save(durable=True)
        job.close()
        assert capsys.readouterr().err.count("goes on at sample 48 of 192") == start


def test_trainings_that_take_turns_are_told_of() -> None:
    said, jobs = logged(), [attached(), attached()]
    for batches in zip(*(job.loader(data(LENGTH), M0) for job in jobs), strict=True):
        for job, (x, y, _) in zip(jobs, batches, strict=True):
            job.step(lambda job=job, x=x, y=y: mse_loss(job.model(x), y))  # type: ignore[misc]
    assert sum("within that of another training" in line for line in said) == 1
