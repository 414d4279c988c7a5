"""A job reports its remaining work from what its script declares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.learning_rate.progress import Progress


def told(**declared: Any) -> tuple[list[tuple[float, float]], int]:
    """Return (progress, target) before each micro-batch and at the end, and the optimizer steps taken."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job = attach(model, optimizer, adaptive=False)
    loader = job.loader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), 8, shuffle=False)
    count = declared.pop("count", None)
    seen = []
    for _ in job.epochs(*([] if count is None else [count]), **declared):
        for x, y in loader:
            report = job.report()
            seen.append((report["progress"], report["target"]))
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
    report = job.report()
    seen.append((report["progress"], report["target"]))
    job.close()
    return seen, job.progress.optimizer_steps


@pytest.mark.parametrize(
    ("declared", "steps"),
    [
        ({"count": 2}, 10),
        ({"count": 2, "statistical": True}, 10),
        ({"steps": 7}, 7),
        ({"count": 0.6}, 3),
        ({"count": 0.6, "statistical": True}, 3),
    ],
)
def test_epochs_passes_and_steps_all_tell_what_is_left(declared: dict[str, Any], steps: int) -> None:
    seen, taken = told(**declared)
    assert taken == steps
    progress, targets = zip(*seen, strict=True)
    assert targets == pytest.approx([steps] * len(targets))
    assert list(progress) == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, pytest.approx(steps))


def test_passes_are_worth_less_at_a_batch_size_that_is_less_efficient() -> None:
    progress = Progress(initial=8, examples=80.0, epoch=1, pass_from=1, passes=4)
    assert progress.target_steps(40, 1, 20, 1.0) == pytest.approx(10 + (3 * 40 - 20) / 8)
    assert progress.target_steps(40, 1, 20, 0.5) == pytest.approx(10 + (3 * 40 - 20) / 16)
    assert progress.target_steps(40, 5, 0, 0.5) == pytest.approx(10)
    assert Progress(initial=8).target_steps(40, 0, 0, 1.0) is None


def test_a_restart_keeps_the_progress_and_takes_the_script_s_length() -> None:
    before = Progress(initial=8, target=400.0)
    before.advance(100, 0.5)
    before.next_epoch(40, pass_index=2)
    after = Progress(initial=16, target=800.0)
    after.load_state_dict({**before.state_dict(), "of_a_newer_version": 1})
    assert (after.initial, after.target, after.passes) == (8, 800.0, None)
    assert (after.examples, after.samples, after.optimizer_steps) == (50.0, 100, 1)
    assert (after.epoch, after.epoch_from, after.pass_from) == (1, 40.0, 2)
    assert not hasattr(after, "of_a_newer_version")


@pytest.mark.parametrize(("examples", "begins"), [(79.4, 79.4), (79.5, 80.0), (80.0, 80.0), (95.0, 80.0)])
def test_an_epoch_begins_where_the_last_one_was_complete_or_was_left(examples: float, begins: float) -> None:
    progress = Progress(initial=8, examples=examples)
    assert progress.epoch_done(80) == (begins == 80.0)
    progress.next_epoch(80, pass_index=1)
    assert progress.epoch_from == begins


def test_a_length_is_declared_once() -> None:
    model = torch.nn.Linear(3, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    job.loader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), 8)
    for declared in ({}, {"count": 2, "steps": 5}):
        with pytest.raises(PolluxAgentError, match="steps=N alone"):
            next(job.epochs(**declared))
    job.close()


def test_an_epoch_is_done_at_its_examples_or_at_the_declared_end() -> None:
    progress = Progress(initial=8)
    progress.advance(79, 1.0)
    assert not progress.epoch_done(80)
    progress.advance(1, 1.0)
    assert progress.epoch_done(80)
    progress.next_epoch(80, pass_index=1)
    assert not progress.epoch_done(80)
    progress.target = 120.0
    progress.advance(40, 1.0)
    assert progress.epoch_done(80)
