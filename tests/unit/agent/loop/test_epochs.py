"""How long `job.epochs` trains, and where its schedule ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.optim.lr_scheduler import OneCycleLR

from pollux import attach
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice
from tests.unit.agent.regression import attached, data, network

M0 = 16


def trained(*, statistical: bool, count: float = 3) -> tuple[list[int], Any, Any]:
    """Train at four times M0; return the samples of each epoch, the job and its schedule."""
    examples = data()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    scheduler = OneCycleLR(optimizer, 1e-3, total_steps=3 * (len(examples) // M0))
    job = attach(model, optimizer, scheduler, adaptive=True, measuring={"every": 1})
    loader = job.loader(examples, M0, max_batch_size=4 * M0, per_gpu=(1, 2 * M0))
    job.training.choice = BatchChoice(2 * M0, 1)
    found = []
    for _ in job.epochs(count, statistical=statistical):
        before = job.progress.samples
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
        found.append(job.progress.samples - before)
    job.close()
    return found, job, scheduler


def test_an_epoch_is_a_pass_at_every_batch_size_and_the_schedule_ends_with_the_last() -> None:
    samples, job, scheduler = trained(statistical=False)
    length = job.dataset_length
    assert samples == [length] * 3
    assert job.progress.examples < 2.9 * length, "a test that the progress passes as well"
    assert 3 * (length // M0) - 3 <= scheduler.last_epoch <= 3 * (length // M0)


def test_a_statistical_epoch_takes_more_samples_where_batches_are_larger() -> None:
    samples, job, scheduler = trained(statistical=True)
    assert sum(samples) > 3.2 * job.dataset_length
    assert 3 * (job.dataset_length // M0) - 3 <= scheduler.last_epoch <= 3 * (job.dataset_length // M0)


def test_a_part_of_an_epoch_is_a_part_of_a_pass() -> None:
    samples, job, _ = trained(statistical=False, count=1.5)
    assert samples[0] == job.dataset_length
    assert job.dataset_length / 2 <= samples[1] < job.dataset_length / 2 + 4 * M0


class Average:
    """As a moving average of weights."""

    value = 0.0

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def started(folder: Path, state: Any) -> Any:
    job = attached(0.01, adaptive=None, checkpoint_dir=folder, state=state)
    loader = job.loader(data(), M0)
    return job, loader


def test_a_dict_of_objects_and_plain_values_is_restored(tmp_path: Path) -> None:
    ema = Average()
    state = {"ema": ema, "best": 0.0, "gone": 1}
    job, loader = started(tmp_path, state)
    for _ in job.epochs(1):
        for x, y, _ in loader:
            job.step(lambda x=x, y=y: mse_loss(job.model(x), y))
        ema.value, state["best"] = 0.5, 0.9
    job.close()
    again = {"ema": Average(), "best": 0.0, "new": 7}
    job, _ = started(tmp_path, again)
    job.close()
    assert (again["ema"].value, again["best"], again["new"]) == (0.5, 0.9, 7)  # type: ignore[attr-defined]
    assert "gone" not in again
    with pytest.raises(PolluxAgentError, match="state of 'best' to be one of a Average, got float"):
        started(tmp_path, {"best": Average()})
