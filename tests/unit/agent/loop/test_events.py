"""What happens to a training stands in the job's log as lines for programs, beside the sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

from pollux import attach


def run(folder: Path, epochs: int) -> None:
    model = torch.nn.Linear(4, 1)
    job = attach(model, torch.optim.SGD(model.parameters(), 0.01), adaptive=False, checkpoint_dir=folder)
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    loader = job.loader(TensorDataset(x, x.sum(1, keepdim=True)), 16)
    for _ in job.epochs(epochs):
        for a, b in loader:
            job.step(lambda a=a, b=b: mse_loss(job.model(a), b))  # type: ignore[misc]
    job.close()


def events(capfd: Any) -> list[dict[str, Any]]:
    lines = capfd.readouterr().err.splitlines()
    return [json.loads(line.removeprefix("POLLUX ")) for line in lines if line.startswith("POLLUX ")]


def test_a_job_tells_its_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    run(tmp_path, 1)
    begun, finished = events(capfd)
    assert (begun["event"], begun["gpus"], begun["batch_size"], begun["step"]) == ("begun", 1, 16, 0)
    assert (finished["event"], finished["step"]) == ("finished", 3)
    assert begun["at"] <= finished["at"]
    monkeypatch.setenv("POLLUX_RUN", "2")
    run(tmp_path / "again", 1)
    assert {event["run"] for event in events(capfd)} == {"2"}
    run(tmp_path / "again", 1)
    told = [(event["event"], event["step"]) for event in events(capfd)]
    assert told == [("restored", 3), ("begun", 3), ("already-finished", 3)]


def test_outside_of_slurm_the_sentences_stand_alone(tmp_path: Path, capfd: Any) -> None:
    run(tmp_path, 1)
    assert events(capfd) == []
