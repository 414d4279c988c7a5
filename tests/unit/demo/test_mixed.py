"""The mixed run: which jobs are plain, and how long they wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from contrib.demo.measure import Recording, Track
from contrib.demo.mixed import Waits, plain_half, waits
from contrib.demo.workload import Size, load

WORK = load(Path(__file__).parents[3] / "contrib/demo/workload.toml")
SIZES = {training.name: Size(1, 4, 64, 1.0, 0.1) for training in WORK.trainings}


def recording(**starts: float | None) -> Recording:
    """Jobs submitted at 100 s, with GPUs from `starts`."""
    tracks = {}
    for job_id, (name, start) in enumerate(starts.items(), 1):
        held = [(100.5, 0)] if start is None else [(100.5, 0), (start, 4), (start + 60, 0)]
        tracks[job_id] = Track(name, job_id, 100.0, gpus=held)
    return Recording(100.0, tracks)


def test_every_second_training_by_arrival_is_a_plain_job():
    assert list(plain_half(WORK, SIZES)) == ["conv-b", "mlp"]


def test_a_wait_ends_with_the_first_gpus():
    found = recording(a=130.0, b=None).tracks
    assert found[1].wait_s == 30.0
    assert found[2].wait_s is None


def test_waits_are_of_the_plain_jobs_alone():
    half = plain_half(WORK, SIZES)
    both = waits(
        recording(**{"conv-b": 110.0, "mlp": 160.0, "fixed": 300.0}),
        recording(**{"conv-b": 104.0, "mlp": 156.0, "fixed": 100.0}),
        half,
    )
    assert both.document() == {
        "plain": {
            "conv-b": {"wait_s": 10.0, "wait_without_s": 4.0},
            "mlp": {"wait_s": 60.0, "wait_without_s": 56.0},
        },
        "mean_wait_s": 35.0,
        "mean_wait_without_s": 30.0,
    }
    assert both.harmed, "35 s are more than 1.1 times 30 s, and the samples are a second apart"


@pytest.mark.parametrize(("wait", "harmed"), [(0.0, False), (111.0, False), (111.5, True)])
def test_plain_jobs_may_wait_a_tenth_longer(wait, harmed):
    assert Waits({"a": wait}, {"a": 100.0}).harmed is harmed
