"""Moves within the allocation, action by action."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.actions import (
    PAUSED,
    Action,
    Drain,
    Fail,
    GiveBack,
    Place,
    Reach,
    Recruit,
    Wait,
    Withdraw,
)
from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.machine import next_action
from polluxd.apply.resizing import left_over
from polluxd.config.settings import MoveSettings
from polluxd.model import JobState, Move, Placement, Report, Step
from polluxd.slurm.protocol import SlurmJob

from .resized_job import BOTH, NODES, ONE, companion, job, move, says

ALL_FREE, NONE_FREE = (
    capacity(NODES, {}, []),
    capacity([replace(n, foreign_gpus=4) for n in NODES], {}, []),
)

WAITING = companion(state=JobState.PENDING)


def act(
    the_move: Move,
    *,
    shown: SlurmJob | None = None,
    report: Report | None = None,
    lent: SlurmJob | None = None,
    room: Capacity = ALL_FREE,
    waited: float = 1.0,
    since_try: float = float("inf"),
    paused: bool = False,
) -> Action:
    return next_action(
        the_move,
        shown or job(the_move.source),
        report,
        room,
        now=1000.0,
        waited=waited,
        since_try=since_try,
        limits=MoveSettings(),
        paused=paused,
        companion=lent,
    )


def test_a_shrink_waits_for_nobodys_gpus_and_then_for_its_agent() -> None:
    assert act(move(Step.PLANNED, grow=False), room=NONE_FREE) == Drain()
    draining = move(Step.DRAINING, grow=False)
    assert act(draining) == Wait()
    # No checkpoint stands in for it: the ranks on the nodes to give back have to leave first.
    late = act(draining, report=says(checkpointed=True), waited=31.0)
    assert isinstance(late, Fail)
    assert "did not shrink" in late.reason


def test_nodes_are_given_back_after_the_ranks_have_left_and_the_end_is_reported() -> None:
    left = move(Step.CHECKPOINTED, grow=False)
    assert act(left) == GiveBack()
    assert act(left, since_try=1.0) == Wait()
    assert act(left, shown=job(ONE)) == Reach(Step.CONFIGURED)
    assert isinstance(act(left, waited=61.0), Fail)
    given = move(Step.CONFIGURED, grow=False)
    assert act(given, shown=job(ONE), report=says(resized=4)) == Wait()
    assert act(given, shown=job(ONE), report=says(resized=5)) == Reach(Step.TRAINING)
    assert act(given, shown=job(ONE), report=says(resized=5, attempt=1)) == Wait()
    assert isinstance(act(given, shown=job(ONE), waited=121.0), Fail)


def test_a_grow_starts_when_its_gpus_are_free() -> None:
    planned = move(Step.PLANNED, grow=True)
    assert act(planned) == Recruit()
    assert act(planned, room=NONE_FREE) == Wait()
    late = act(planned, room=NONE_FREE, waited=61.0)
    assert isinstance(late, Withdraw)
    assert not late.rest, "nothing was asked of the job"


def test_a_move_from_where_the_job_is_no_longer_is_not_begun() -> None:
    for grow in (True, False):
        elsewhere = act(move(Step.PLANNED, grow=grow), shown=job(Placement(("n1", "n3"), 4)))
        assert isinstance(elsewhere, Withdraw)
        assert not elsewhere.rest


def test_a_companion_is_placed_watched_and_joins() -> None:
    recruiting = move(Step.RECRUITING, grow=True)
    assert act(recruiting) == Wait()
    assert act(recruiting, lent=WAITING) == Place()
    assert act(recruiting, lent=WAITING, room=Capacity(closed={"n2"})) == Wait()
    assert isinstance(act(recruiting, lent=WAITING, room=Capacity(closed={"n2"}), waited=61.0), Fail)
    assert isinstance(act(recruiting, waited=61.0), Fail)
    there = companion(("n2",))
    lost = act(recruiting, lent=there)
    assert isinstance(lost, Reach)
    assert lost.step is Step.CONFIGURED
    configured = move(Step.CONFIGURED, grow=True)
    assert act(configured, lent=WAITING) == Wait()
    assert act(configured, lent=there) == Reach(Step.STARTED)
    assert isinstance(act(configured, lent=WAITING, waited=31.0), Fail)
    started = move(Step.STARTED, grow=True)
    assert act(started, lent=there, report=says(resized=4)) == Wait()
    assert act(started, lent=there, report=says(resized=5)) == Reach(Step.TRAINING)
    assert isinstance(act(started, lent=there, waited=121.0), Fail)


@pytest.mark.parametrize(
    "lent",
    [
        companion(("n3",)),
        companion(("n2",), JobState.COMPLETING),
        companion(("n2",), JobState.SUSPENDED),
        companion(state=JobState.PENDING, held_by_user=True),
        None,
    ],
)
@pytest.mark.parametrize("step", [Step.CONFIGURED, Step.STARTED])
def test_a_companion_that_is_not_what_was_asked_for_ends_the_move(step: Step, lent: SlurmJob | None) -> None:
    assert isinstance(act(move(step, grow=True), lent=lent), Fail)


def test_what_the_agent_refuses_is_not_waited_for_and_an_earlier_refusal_is() -> None:
    no = says(refused=5, refused_why="sbatch is forbidden")
    for step, grow in ((Step.RECRUITING, True), (Step.STARTED, True), (Step.DRAINING, False)):
        told = act(move(step, grow=grow), report=no, lent=None)
        assert told == Fail("the job's agent could not: sbatch is forbidden", undrained=not grow)
    assert act(move(Step.RECRUITING, grow=True), report=says(refused=4)) == Wait()
    assert act(move(Step.RECRUITING, grow=True), report=says(refused=5, attempt=1)) == Wait()
    assert act(move(Step.CHECKPOINTED, grow=False), report=no) == GiveBack(), "its ranks have left"


def test_the_allocation_goes_and_the_move_with_it() -> None:
    for shown in (
        job(BOTH, JobState.COMPLETING),
        job(Placement(), JobState.PENDING),
        job(BOTH, restart_count=1),
        job(BOTH, JobState.SUSPENDED),
    ):
        for step in (Step.DRAINING, Step.CHECKPOINTED, Step.CONFIGURED):
            assert isinstance(act(move(step, grow=False), shown=shown), Fail)


def test_a_move_is_taken_back_and_paused_until_the_point_of_no_return() -> None:
    def outcome(step: Step, *, grow: bool, lent: SlurmJob | None = None, paused: bool = False) -> Action:
        by = "" if paused else "ann@host"
        return act(move(step, grow=grow, cancelled_by=by), lent=lent, paused=paused)

    back = Withdraw("cancelled by ann@host", rest=True)
    assert outcome(Step.PLANNED, grow=False) == back
    assert outcome(Step.DRAINING, grow=False) == back
    assert outcome(Step.CHECKPOINTED, grow=False) == GiveBack()
    assert outcome(Step.RECRUITING, grow=True, lent=WAITING) == back
    assert outcome(Step.CONFIGURED, grow=True, lent=WAITING) == back
    assert outcome(Step.CONFIGURED, grow=True, lent=companion(("n2",))) == Reach(Step.STARTED)
    assert outcome(Step.STARTED, grow=True, lent=companion(("n2",))) == Wait()
    stopped = Withdraw(PAUSED, rest=False)
    assert outcome(Step.PLANNED, grow=False, paused=True) == stopped
    assert outcome(Step.RECRUITING, grow=True, lent=WAITING, paused=True) == stopped
    assert outcome(Step.CONFIGURED, grow=True, lent=WAITING, paused=True) == Wait()


def test_what_comes_in_is_set_aside_and_what_leaves_is_free_when_slurm_shows_it() -> None:
    jobs = {7: job(ONE)}
    coming = capacity(NODES, jobs, [move(Step.RECRUITING, grow=True)])
    assert coming.free == {"n1": 0, "n2": 0, "n3": 4}
    assert coming.kept(Placement(("n2",), 4))
    arrived = capacity(
        NODES, jobs, [move(Step.STARTED, grow=True)], pending_companions={5: companion(("n2",))}, orphans=[]
    )
    assert arrived.free == {"n1": 0, "n2": 0, "n3": 4}
    astray = capacity(NODES, jobs, [move(Step.RECRUITING, grow=True)], orphans=[companion(("n2",))])
    assert not astray.kept(Placement(("n2",), 4))
    leaving = capacity(NODES, {7: job(BOTH)}, [move(Step.CHECKPOINTED, grow=False)])
    assert leaving.free["n2"] == 0
    assert leaving.fits_soon(Placement(("n2",), 4), Placement(), 8)
    may_stay = capacity(NODES, {7: job(BOTH)}, [move(Step.DRAINING, grow=False)])
    assert not may_stay.fits_soon(Placement(("n2",), 4), Placement(), 8)


def test_a_shrink_that_was_carried_out_although_it_failed_leaves_something_over() -> None:
    failed = move(Step.FAILED, grow=False)
    assert left_over(job(BOTH), says(resized=5), {5: failed}) == failed
    assert left_over(job(ONE), says(resized=5), {5: failed}) is None
    gone = replace(failed, target=Placement(("n1", "n3"), 4))  # a companion on n3 is gone too
    assert left_over(job(BOTH), says(resized=5), {5: gone}) == gone
    assert left_over(job(BOTH), says(resized=4), {5: failed}) is None
    assert left_over(job(BOTH, restart_count=1), says(resized=5), {5: failed}) is None
    assert left_over(job(BOTH), says(resized=5, attempt=1), {5: failed}) is None
    assert left_over(job(BOTH), says(resized=5), {5: replace(failed, job_id=8)}) is None
    assert left_over(job(BOTH), says(resized=5), {5: replace(failed, step=Step.TRAINING)}) is None
    assert left_over(job(BOTH), says(resized=5), {5: move(Step.FAILED, grow=True)}) is None
