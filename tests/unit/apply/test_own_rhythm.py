"""Trainers that save by themselves are moved at their own checkpoints, and seldom."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from polluxd.apply.own_rhythm import LONGEST_S, OwnRhythm
from polluxd.config.settings import MoveSettings
from polluxd.model import JobSpec, JobState, Report
from polluxd.slurm.protocol import ClusterState
from polluxd.slurm.rules import Rules
from polluxd.store import CycleRecords, MoveTotals
from tests.unit.apply.four_nodes import MAIN, NODES, NOW, job
from tests.unit.apply.resized_job import says

RUNNING = job(1, gpus_per_node_held={"n1": 4}, nodes=("n1",))
SAVER = says(at=NOW, first_step_at=NOW - 10_000.0, next_save_s=540.0)


class Seen:
    """One job's own rhythm over time."""

    def __init__(self, **limits: object) -> None:
        self._rhythm = OwnRhythm(MoveSettings(**limits))

    def why(self, report: Report, at: float, shown: object = RUNNING, cost: float | None = None) -> str:
        totals = {} if cost is None else {1: MoveTotals(1, cost, {"requeue": cost})}
        state = ClusterState(at, NODES, (shown,), {}, Rules(MAIN))
        self._rhythm.observe(state, CycleRecords(reports={1: report}, totals=totals))
        return self._rhythm.stays.get(1, "")

    def least(self, own_size: int | None, at: float, cost: float | None = None, **spec: Any) -> int:
        shown = replace(RUNNING, spec=JobSpec(own_size=own_size, **spec))
        self.why(replace(SAVER, first_step_at=NOW, next_save_s=None), at, shown, cost)
        return self._rhythm.least.get(1, 0)


def test_a_plan_waits_for_the_next_checkpoint() -> None:
    seen = Seen()
    assert seen.why(SAVER, NOW) == "moves at its next checkpoint, in about 9 min"
    assert seen.why(SAVER, NOW + 470.0) == "moves at its next checkpoint, in about 70 s"
    assert seen.why(SAVER, NOW + 485.0) == "", "a drain waits for the rest"
    assert Seen(drain_timeout_s=300.0).why(SAVER, NOW + 250.0) == ""
    assert seen.why(replace(SAVER, next_save_s=None), NOW) == ""
    assert seen.why(replace(SAVER, attempt=7), NOW) == "", "it says nothing of this attempt"
    assert seen.why(SAVER, NOW, replace(RUNNING, state=JobState.PENDING)) == ""


@pytest.mark.parametrize("claimed", [3599.0, 1e9])
def test_no_plan_waits_for_more_than_an_hour_in_all(claimed: float) -> None:
    seen, waited = Seen(), 0.0
    while seen.why(replace(SAVER, at=NOW + waited, next_save_s=claimed), NOW + waited):
        waited += 30.0
    assert LONGEST_S <= waited <= LONGEST_S + 60.0
    for more in range(3):
        at = NOW + waited + more * 4000.0
        assert not seen.why(replace(SAVER, at=at, next_save_s=claimed), at), "nor once more in this attempt"
    # A checkpoint that comes as it was said begins the wait again.
    assert not seen.why(replace(SAVER, at=at, next_save_s=1.0), at)
    assert seen.why(replace(SAVER, at=at), at)


def test_a_move_is_paid_off_by_training_before_the_next_one() -> None:
    moved = replace(SAVER, first_step_at=NOW, next_save_s=0.0)
    assert Seen().why(moved, NOW, cost=45.0) == (
        "trains for 15 min more before its next move: one has cost it 45 s"
    )
    assert not Seen().why(moved, NOW + 901.0, cost=45.0)
    assert not Seen().why(moved, NOW), "it has not moved yet"
    assert not Seen().why(replace(moved, next_save_s=None), NOW, cost=45.0), "no trainer of its own loop"
    assert not Seen(own_loop_rest=0).why(moved, NOW, cost=45.0)
    assert not Seen().why(moved, NOW + LONGEST_S, cost=1e6), "bounded: a user may claim any cost"


def test_a_trainer_is_tried_on_fewer_gpus_than_asked_once_it_has_trained_as_long_as_after_a_move() -> None:
    assert (Seen().least(2, NOW + 599.0), Seen().least(2, NOW + 601.0)) == (2, 0), "20 times 30 s"
    assert (Seen().least(2, NOW + 899.0, 45.0), Seen().least(2, NOW + 901.0, 45.0)) == (2, 0)
    assert Seen().least(8, NOW) == 4, "it has shown to work on what it has"
    assert Seen().least(4, NOW, max_gpus=2) == 2, "its user, or an administrator, wants no more"
    assert Seen().least(None, NOW) == 0, "it calls attach: any size does"
    assert Seen(own_loop_rest=0).least(2, NOW) == 0
