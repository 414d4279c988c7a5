"""The measurements of `make refusals`, and what it calls wrong."""

from __future__ import annotations

from typing import Any

from contrib.devcluster.polluxd import lost_gpu_s
from contrib.refusals.__main__ import WANTED, Watched, wrong
from contrib.refusals.causes import ROWS
from contrib.refusals.page import page
from polluxd.model import NO_PLACEMENT, Move, Placement, Step

RUNS = "JobId=7 JobName=r7 JobState=RUNNING Reason=None Restarts=1 NodeList=n8 TRES=cpu=4,mem=1600M,node=1,gres/gpu=4"
WAITS = (
    "JobId=7 JobName=r7 JobState=PENDING Reason=Resources Restarts=2 TRES=cpu=4,node=1,billing=4,gres/gpu=4"
)


def row(**more: Any) -> dict[str, Any]:
    known = {"act": "grow", "cause": "a limit", "slurm": "22.5.8", "stopped_s": 0.0, "control_stopped_s": 0.0}
    known |= {"stops": 0, "control_stops": 0, "final_gpus": 2, "control_final_gpus": 2, "error": ""}
    return {**known, **more}


def test_slurm_s_record_says_when_a_training_stood() -> None:
    watched = Watched(submitted=100.0)
    watched.see(RUNS, 103.0)
    assert (watched.started, watched.gpus, watched.stopped_s) == (103.0, 4, 0.0)
    watched.since = 104.0
    watched.see(WAITS, 105.0)
    watched.see(WAITS, 107.0)
    watched.see(RUNS.replace("Restarts=1", "Restarts=2"), 108.0)
    watched.see(WAITS.replace("Restarts=2", "Restarts=3"), 109.0)
    assert watched.stopped_s == 4.0
    watched.end([101.0, 104.5])
    assert (watched.restarts, watched.stops) == (3, 1), "one of the attempts that ended had made no step"
    watched.see(WAITS, 120.0)
    assert (watched.stopped_s, watched.gpus) == (4.0, 0), "what comes after is no part of the row"


def test_a_job_that_holds_its_gpus_and_makes_no_step_stands() -> None:
    watched = Watched(submitted=100.0, since=104.0)
    for at in range(104, 161):
        watched.see(RUNS.replace("Restarts=1", "Restarts=0"), float(at))
    watched.end([101.0, 105.0, 109.0, 150.0])
    assert (watched.stopped_s, watched.stops) == (41.0, 0)


def test_two_stops_and_long_ones_and_late_starts_are_wrong() -> None:
    assert not wrong([row(), row(stops=1, stopped_s=9.0), row(stops=3, stopped_s=60.0, control_stops=1)])
    assert wrong([row(stops=2, stopped_s=4.0)]) == ["grow a limit: 2 stops, 4 s"]
    assert wrong([row(stops=1, stopped_s=11.0)])
    assert not wrong([row(act="start", stopped_s=16.0, control_stopped_s=2.0)])
    assert wrong([row(act="start", stopped_s=18.0, control_stopped_s=2.0)])
    assert wrong([row(cause="none")]) == ["grow none: it did not grow"], (
        "else the other rows could see no move"
    )


def test_the_page_says_what_ran_and_what_did_not() -> None:
    told = page(
        [row(), row(cause="met once", stops=1, stopped_s=7.5), row(cause="broken", error="no start")],
        "abc",
        [("grow", "a limit"), ("grow", "broken"), ("shrink", "later")],
    )
    assert "At abc: 1 of 2 refused moves stopped the training for 0 s, none for more than 7.5 s" in told
    assert "Without a result: grow: broken; shrink: later." in told
    assert len(ROWS) >= 50
    assert len(WANTED) == len(set(WANTED)), "each row has a name of its own"


def move(
    number: int, source: Placement, step: Step, *, job_id: int = 7, path: str = "requeue", **at: float
) -> Move:
    times = {Step(name): seconds for name, seconds in {"planned": 100.0 + number, **at}.items()}
    return Move(number, job_id, 0, path, source, Placement(("n1",), 4), "", step, times)


def test_a_training_that_stood_for_nothing_counts_until_it_has_gpus_again() -> None:
    two = Placement(("n1",), 2)
    failed = move(1, two, Step.FAILED, checkpointed=110.0, requeued=111.0, failed=120.0)
    refused = move(2, two, Step.FAILED, draining=130.0, failed=140.0)
    others = move(3, NO_PLACEMENT, Step.TRAINING, job_id=8, path="start", started=121.0)
    back = move(4, NO_PLACEMENT, Step.TRAINING, path="start", configured=122.0, started=125.0)
    moved = move(5, two, Step.TRAINING, checkpointed=150.0, requeued=151.0, started=155.0)
    assert lost_gpu_s([failed, refused, others, back, moved]) == 30.0
    assert lost_gpu_s([failed]) == 20.0
    assert lost_gpu_s([failed, back], since=102.0) == 0.0
    unheard = move(6, two, Step.FAILED, checkpointed=160.0, started=164.0, failed=300.0)
    assert lost_gpu_s([unheard]) == 8.0, "it trains at its target, as far as anybody knows"
