"""The figures of a period: what each job held, and what accounts, users and moves add up to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polluxd.cli.report.figures import Stretch, figures, stretches
from polluxd.model import NO_PLACEMENT, Move, Placement, Step
from polluxd.store import JobView
from tests.build import move as build_move

from .conftest import NOW, VIEW

T = NOW - 10_000
ONE, FOUR = Placement(("n1",), 1), Placement(("n1",), 4)


def job(**words: Any) -> JobView:
    return replace(VIEW, submitted_at=T, started_at=T + 100, ended_at=T + 1000, state="COMPLETED", **words)


def move(number: int, path: str, source: Placement, target: Placement, step: Step, **at: float) -> Move:
    times = {Step(name): T + seconds for name, seconds in at.items()}
    return build_move(path, source, target, step, times, id=number, reason="grows")


START = move(1, "start", NO_PLACEMENT, ONE, Step.TRAINING, planned=90, started=100, training=120)
GROWTH = move(
    2, "requeue", ONE, FOUR, Step.TRAINING, planned=300, draining=301, requeued=310, started=330, training=350
)
RESIZE = move(3, "resize", FOUR, ONE, Step.TRAINING, planned=590, training=600)
BROKEN = move(4, "resize", ONE, FOUR, Step.FAILED, planned=700, failed=710)


def made(**words: Any) -> Any:
    given: dict[str, Any] = {
        "views": [job()],
        "moves": [START, GROWTH, RESIZE, BROKEN],
        "costs": [{"id": 2, "job_id": 7, "total_s": 40.0}, {"id": 3, "job_id": 7, "total_s": 2.0}],
        "speedups": {7: 1.5},
    }
    return figures("dev", T, T + 2000, **{**given, **words})


def test_a_lane_follows_the_moves() -> None:
    assert stretches(job(), [START, GROWTH, RESIZE, BROKEN], T, T + 2000) == [
        Stretch(T, T + 100, 0),
        Stretch(T + 100, T + 310, 1),
        Stretch(T + 310, T + 330, 0),
        Stretch(T + 330, T + 600, 4),
        Stretch(T + 600, T + 1000, 1),
    ]


def test_a_companion_holds_gpus_from_its_start_until_its_move_fails() -> None:
    both = Placement(("n1", "n2"), 1)
    grown = move(2, "resize", ONE, both, Step.TRAINING, planned=200, started=210, training=230)
    gone = move(3, "resize", both, ONE, Step.TRAINING, planned=300, configured=310, training=330)
    failed = move(4, "resize", ONE, both, Step.FAILED, planned=400, started=410, failed=440)
    held = stretches(job(), [START, grown, gone, failed], T + 100, T + 2000)
    assert [(s.end - T, s.gpus) for s in held] == [(210, 1), (310, 2), (410, 1), (440, 2), (1000, 1)]


def test_a_lane_ends_at_the_period() -> None:
    assert stretches(job(), [START, GROWTH], T + 320, T + 400) == [
        Stretch(T + 320, T + 330, 0),
        Stretch(T + 330, T + 400, 4),
    ]


def test_a_job_that_polluxd_never_started_holds_what_slurm_gave_it() -> None:
    running = replace(VIEW, submitted_at=T, started_at=T + 50, gpus=2)
    assert stretches(running, [], T, T + 100) == [Stretch(T, T + 50, 0), Stretch(T + 50, T + 100, 2)]


def test_figures_of_one_job_add_up() -> None:
    found = made()
    (one,) = found.jobs
    assert one["gpu_seconds"] == 210 * 1 + 270 * 4 + 400 * 1
    assert (one["waited_s"], one["completion_s"]) == (120, 1000)
    assert one["waited_s"] + sum(s.end - s.begin for s in one["lane"] if s.gpus) == one["completion_s"]
    assert (one["moves"], one["lost_s"]) == (2, 42.0)
    (account,) = found.accounts
    assert (account["name"], account["share"], account["speedup"]) == ("vision", 1.0, 1.5)
    paths = {path["path"]: path for path in found.paths}
    resize = paths["resize"]
    assert (resize["completed"], resize["failed"], resize["total_s"]) == (1, 1, 2.0)
    assert paths["requeue"]["median_s"] == 40.0


def test_jobs_and_moves_outside_of_the_period_are_left_out() -> None:
    later = figures("dev", T + 1500, T + 2000, views=[job()], moves=[START], costs=[], speedups={})
    assert (later.jobs, later.paths) == ([], [])
