"""`polluxctl history`: stretches of time, and its picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from polluxd.cli.show import stretches
from polluxd.store import HistoryPoint

from .conftest import NOW, MemoryStore


def reported(at: float, gpus: int = 1, batch: int = 64, goodput: float = 100.0, **words: Any) -> HistoryPoint:
    given: dict[str, Any] = {
        "job_id": 7, "attempt": 0, "at": NOW + at, "gpus": gpus, "nodes": 1, "batch_size": batch, "local_batch": batch,
        "accumulation": 0, "goodput": goodput, "throughput": 2 * goodput, "progress": at, "target": 100.0, "epoch": 1.0,
        "lr_factor": 1.0, "noise_scale": 50.0, "optimizer_steps": 10,
    }  # fmt: skip
    return HistoryPoint(**{**given, **words})


POINTS = [
    reported(0, goodput=0.0, noise_scale=None),
    reported(30),
    reported(60, goodput=200.0, noise_scale=80.0),
    reported(90, gpus=4, batch=256, goodput=600.0),
    reported(120, gpus=4, batch=256, goodput=800.0, target=None),
]


@pytest.fixture
def reports(store: MemoryStore) -> MemoryStore:
    store.points = POINTS
    return store


def test_reports_with_the_same_gpus_and_batch_size_are_one_stretch() -> None:
    first, second = stretches([asdict(point) for point in POINTS])
    assert (first["at"], first["lasted_s"], first["gpus"], first["batch_size"]) == (NOW, 90, 1, 64)
    assert (first["goodput"], first["noise_scale"], first["done"]) == (150.0, 80.0, 0.6)
    assert (second["lasted_s"], second["goodput"], second["done"]) == (30, 700.0, None)


def test_the_table_has_one_line_per_stretch_and_json_every_report(
    reports: MemoryStore, polluxctl: Any
) -> None:
    lines = polluxctl("history", "7").out.splitlines()
    assert len(lines) == 3
    assert "NOISE SCALE" in lines[0]
    assert "256" in lines[2]
    assert [point["gpus"] for point in json.loads(polluxctl("history", "7", "--json").out)] == [1, 1, 1, 4, 4]


def test_a_period_without_reports_says_so(reports: MemoryStore, polluxctl: Any) -> None:
    said = polluxctl("history", "7", "--since", "2100-01-01")
    assert said.status == 1
    assert "job 7 has no reports in this time" in said.err
