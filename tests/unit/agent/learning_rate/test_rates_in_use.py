"""The learning rates in use, as a script, a log and a chart see them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss

from pollux import Job, attach
from pollux.goodput import BatchChoice
from pollux.learning_rate.scaling import name_of, rule_for
from tests.unit.agent.regression import data, network


def linear(scale: float, noise: object) -> float:
    return scale


def started(**options: Any) -> tuple[Job, Any, list[list[float]]]:
    """A job with two groups, and what its optimizer sees in each step."""
    model: Any = network()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.3, "name": "head"}]
    optimizer = torch.optim.SGD(groups, 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    job = attach(model, optimizer, scheduler, scaling=linear, adaptive=True, **options)
    loader = job.loader(data(), 16, max_batch_size=64, per_gpu=(1, 16))
    seen: list[list[float]] = []
    optimizer.register_step_pre_hook(
        lambda *_: seen.append([group["lr"] for group in optimizer.param_groups])
    )
    return job, loader, seen


def test_the_rates_are_those_that_the_optimizer_saw() -> None:
    job, loader, seen = started()
    assert job.learning_rates == (0.1, 0.3)
    job.training.choice = BatchChoice(16, 1)  # M = 2 M0
    found = []
    for x, y, _ in loader:
        steps = len(seen)
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
        if len(seen) > steps:
            found.append(list(job.learning_rates))
    job.close()
    assert found == seen
    assert found[0] == [0.2, 0.6]
    assert found[2] == pytest.approx([0.1, 0.3]), "the schedule has halved it by now"


def test_a_start_takes_a_line_with_m0_batch_size_rates_and_rule(capfd: Any) -> None:
    started()[0].close()
    assert capfd.readouterr().err.splitlines() == [
        "pollux: batch size 16 on 1 GPU: 16 per GPU; M0 = 16, up to 64 (at once: no grow_after); "
        "learning rate 0.1, 0.3 by rule linear"
    ]


def test_rules_have_the_names_that_attach_takes() -> None:
    for name in ("auto", "adascale", "none"):
        assert name_of(rule_for(name)) == name

    def own(scale: float, noise: object) -> float:
        return 1.0

    assert name_of(rule_for(own)) == "own"


def test_a_chart_has_the_rate_of_each_group_and_the_numbers_of_the_step() -> None:
    job, loader, seen = started()
    rows = []
    for x, y, _ in loader:
        job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
        rows.append((job.progress.optimizer_steps, job.scalars()))
    job.close()
    for step, row in rows:
        assert [row["pollux/lr/0"], row["pollux/lr/head"]] == seen[step - 1]
        assert row["pollux/batch_size"] == 16
        assert {
            "pollux/gain",
            "pollux/progress",
            "pollux/goodput",
            "pollux/lr_factor",
            "pollux/epoch",
        } <= set(row)
