"""Moves within the allocation, action by action; and what carries them out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.actions import (
    PAUSED,
    Action,
    Drain,
    Fail,
    GiveBack,
    Limits,
    Place,
    Reach,
    Recruit,
    Remind,
    Wait,
    Withdraw,
)
from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.intents import Intent
from polluxd.apply.machine import next_action
from polluxd.apply.reconciler import Reconciler
from polluxd.apply.resizing import left_over
from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, JobState, Node, Placement, Reallocation, Report, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Companion, Geometry, SlurmJob
from polluxd.store.fake import FakeRows, FakeStore

ONE, BOTH = Placement(("n1",), 4), Placement(("n1", "n2"), 4)
NODES = (Node("n1", 4, cpus=64), Node("n2", 4, cpus=64), Node("n3", 4, cpus=64))
ALL_FREE, NONE_FREE = (
    capacity(NODES, {}, []),
    capacity([replace(n, foreign_gpus=4) for n in NODES], {}, []),
)


def job(at: Placement, state: JobState = JobState.RUNNING, **more: Any) -> SlurmJob:
    base = SlurmJob(7, "train", "ann", 1000, "", "main", "", state, state.value, "None", 0, 0.0)
    held = dict.fromkeys(at.nodes, at.gpus_per_node)
    return replace(base, **{"spec": JobSpec(), "gpus_per_node_held": held, "batch_host": "n1", **more})


def companion(at: tuple[str, ...] = (), state: JobState = JobState.RUNNING, **more: Any) -> SlurmJob:
    place = Placement(at, 4) if at else Placement()
    return job(place, state, job_id=9, companion=Companion(7, 0, 5), **more)


WAITING = companion(state=JobState.PENDING)


def move(step: Step, *, grow: bool, path: str = "resize", **more: Any) -> Reallocation:
    source, target = (ONE, BOTH) if grow else (BOTH, ONE)
    return Reallocation(5, 7, 0, path, source, target, "", step, {Step.PLANNED: 1.0}, **more)


def says(**more: Any) -> Report:
    return Report(**{"attempt": 0, "at": 1.0, "limits": BatchLimits(32, 1024, 8, 128), **more})


def act(
    the_move: Reallocation,
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
        limits=Limits(),
        paused=paused,
        companion=lent,
    )


def test_a_shrink_waits_for_nobodys_gpus_and_then_for_its_agent() -> None:
    assert act(move(Step.PLANNED, grow=False), room=NONE_FREE) == Drain()
    draining = move(Step.DRAINING, grow=False)
    assert act(draining, since_try=1.0) == Wait()
    assert act(draining) == Remind()
    # No checkpoint stands in for it: the ranks on the nodes to give back have to leave first.
    late = act(draining, report=says(checkpointed=True), waited=31.0)
    assert isinstance(late, Fail)
    assert "did not shrink" in late.reason
    assert act(move(Step.DRAINING, grow=False, path="relaunch"), waited=31.0) == Remind()
    assert isinstance(act(move(Step.DRAINING, grow=False, path="relaunch"), waited=151.0), Fail)


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
    assert act(recruiting) == Remind()
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
        assert told == Fail("the job's agent could not: sbatch is forbidden")
    assert act(move(Step.RECRUITING, grow=True), report=says(refused=4)) == Remind()
    assert act(move(Step.RECRUITING, grow=True), report=says(refused=5, attempt=1)) == Remind()
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
        NODES, jobs, [move(Step.STARTED, grow=True)], recruits={5: companion(("n2",))}, strays=[]
    )
    assert arrived.free == {"n1": 0, "n2": 0, "n3": 4}
    astray = capacity(NODES, jobs, [move(Step.RECRUITING, grow=True)], strays=[companion(("n2",))])
    assert not astray.kept(Placement(("n2",), 4))
    leaving = capacity(NODES, {7: job(BOTH)}, [move(Step.CHECKPOINTED, grow=False)])
    assert leaving.free["n2"] == 0
    assert leaving.fits_soon(Placement(("n2",), 4), Placement())
    may_stay = capacity(NODES, {7: job(BOTH)}, [move(Step.DRAINING, grow=False)])
    assert not may_stay.fits_soon(Placement(("n2",), 4), Placement())


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


# --- carrying out -------------------------------------------------------------------------------------


class Site:
    """One job on n1 and n2, and polluxd's reconciler over the fakes."""

    def __init__(self, **limits: Any) -> None:
        self.slurm = FakeSlurm(NODES)
        self.store = FakeStore(FakeRows(self.slurm.clock))
        assert self.store.lead() == 1
        self.job = self.slurm.submit(JobSpec(cpus_per_gpu=3, mem_per_gpu_mb=100), time_limit_s=3600.0)
        self.acting = Reconciler(
            self.slurm,
            self.store,  # type: ignore[arg-type]
            limits=Limits(),
            cooldown=0.0,
            lease=300.0,
            max_concurrent=0,
            authorize=lambda: 1,
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
            **limits,
        )
        self.report = says()

    def start(self, at: Placement) -> None:
        self.slurm.configure(self.job, Geometry(at.nodes, at.gpus_per_node, 1), start=True)
        self.slurm.advance(2.0)
        self.store.sync_jobs(self.slurm.observe().jobs)

    def begin(self, source: Placement, target: Placement) -> None:
        assert self.acting.begin([Intent(self.job, 0, "resize", source, target, "")], [])

    def turn(self, seconds: float = 4.0) -> int:
        seen = self.acting.gather(self.slurm.observe())
        left = self.acting.tick(seen, {self.job: self.report})
        self.slurm.advance(seconds)
        return left

    @property
    def steps(self) -> list[Step]:
        return [found.step for found in self.store.rows.moves]

    def lend(self, number: int, **more: Any) -> int:
        claim = Companion(self.job, 0, number)
        return self.slurm.submit(JobSpec(), companion=claim, time_limit_s=86400.0, **more)


def test_a_companion_gets_its_parents_share_and_no_more_time_than_it_has_left() -> None:
    site = Site(moves_per_hour=1)
    site.start(ONE)
    site.slurm.advance(600.0)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.turn()
    shown = site.slurm.truth(lent)
    assert shown.gpus_per_node_held == {"n2": 4}
    assert (shown.cpus_per_node_held, shown.mem_per_node_mb) == ({"n2": 12}, 400)
    assert shown.time_limit_s == 3000.0
    for _ in range(2):
        site.turn()
    assert site.steps == [Step.STARTED]
    site.report = says(resized=1)
    site.turn()
    assert site.steps == [Step.TRAINING]
    seen = site.acting.gather(site.slurm.observe())
    assert [j.gpus_per_node_held for j in seen.state.jobs] == [{"n1": 4, "n2": 4}]
    assert site.turn() == 0
    assert site.slurm.truth(lent).state is JobState.RUNNING
    assert site.acting.budget_left() == 1, "nobody was restarted"


def test_a_move_that_fails_ends_its_companion_at_once() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.report = says(refused=1)
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(lent).raw_state == "CANCELLED"


def test_a_refused_placing_fails_the_move_and_not_the_job() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.slurm.fail("configure", SlurmRefused("Requested node configuration is not available"))
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
    assert site.slurm.truth(site.job).gpus_per_node_held == {"n1": 4}


def test_companions_of_nobody_are_ended_though_a_call_is_refused_first() -> None:
    site = Site()
    site.start(ONE)
    strays = [site.lend(77), site.slurm.submit(JobSpec(), companion=Companion(99, 0, 1))]
    site.slurm.fail("cancel", SlurmRefused("Access denied"))
    assert site.turn(1.0) == 2
    assert site.turn(1.0) == 2, "not asked again so soon"
    site.slurm.advance(4.0)
    site.turn()
    assert [site.slurm.truth(j).raw_state for j in strays] == ["CANCELLED", "CANCELLED"]
    assert site.turn() == 0


def test_any_number_of_forged_companions_is_ended_in_bounded_calls() -> None:
    site = Site()
    site.start(ONE)
    forged = [site.lend(77, uid=1001) for _ in range(600)]
    for left in (600, 350, 100, 0):
        assert site.turn(0.5) == left
    assert {site.slurm.truth(j).raw_state for j in forged} == {"CANCELLED"}


def test_nodes_that_a_job_left_in_a_move_that_was_given_up_are_taken_back() -> None:
    site = Site()
    site.start(BOTH)
    site.begin(BOTH, ONE)
    site.turn()
    site.turn(40.0)  # no word from the agent
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(site.job).nodes == ("n1", "n2")
    site.report = says(resized=1)
    site.turn()
    assert site.slurm.truth(site.job).nodes == ("n1",)
    assert site.steps == [Step.FAILED]


def test_where_slurm_does_not_take_them_back_the_job_goes_through_the_queue() -> None:
    site = Site()
    site.start(BOTH)
    site.begin(BOTH, ONE)
    site.turn()
    site.store.rows.acknowledge(1, site.slurm.clock())
    site.report = says(resized=1, first_step_at=1.0, checkpointed=True)
    site.slurm.fail("shrink", SlurmRefused("Operation not permitted"), times=2)
    site.turn()
    assert site.steps == [Step.FAILED]
    site.turn()
    assert site.steps == [Step.FAILED, Step.PLANNED]
    requeue = site.store.rows.moves[1]
    assert (requeue.path, requeue.source, requeue.target) == ("requeue", BOTH, ONE)


def test_a_requeue_ends_the_companions_first() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    for _ in range(3):
        site.turn()
    site.report = says(resized=1)
    site.turn()
    assert site.steps == [Step.TRAINING]
    elsewhere = Placement(("n3",), 4)
    assert site.acting.begin([Intent(site.job, 0, "requeue", BOTH, elsewhere, "")], [])
    site.turn()
    site.store.rows.acknowledge(2, site.slurm.clock())
    site.slurm.calls.clear()
    site.turn()
    assert [call for call in site.slurm.calls if call[0] in ("cancel", "requeue")] == [
        ("cancel", lent),
        ("requeue", site.job),
    ]
    for _ in range(3):
        site.turn()
    assert site.slurm.truth(site.job).gpus_per_node_held == {"n3": 4}
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
