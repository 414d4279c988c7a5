"""The state machine of a move, action by action.

The capacity check keeps every intermediate state legal.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.actions import (
    Configure,
    Drain,
    Fail,
    Reach,
    Requeue,
    Wait,
    Withdraw,
)
from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.intents import intents
from polluxd.apply.machine import next_action
from polluxd.apply.placed import held
from polluxd.config.settings import MoveSettings
from polluxd.model import (
    NO_PLACEMENT,
    Allocation,
    JobSpec,
    JobState,
    Move,
    Node,
    Placement,
    Plan,
    Report,
    SnapshotJob,
    Step,
)
from polluxd.slurm.protocol import SlurmJob
from tests import build

NOW = 1_000.5
ONE = Placement(("n1",), 2)
TWO = Placement(("n1", "n2"), 4)
NODES = (Node("n1", 4), Node("n2", 4))


def slurm_job(
    state: JobState = JobState.RUNNING, at: Placement = ONE, restarts: int = 0, **more: object
) -> SlurmJob:
    holds = state in (JobState.RUNNING, JobState.COMPLETING)
    return build.slurm_job(7, state, at if holds else NO_PLACEMENT, **{"restart_count": restarts, **more})


def move(step: Step, path: str = "requeue", *, waited: float = 1.0, target: Placement = TWO) -> Move:
    source, times = NO_PLACEMENT if path == "start" else ONE, {step: NOW - waited}
    return build.move(path, source, NO_PLACEMENT if path == "park" else target, step, times, reason="because")


def report(attempt: int = 0, *, first_step_at: float | None = 1.0, checkpointed: bool = True) -> Report:
    return Report(
        attempt=attempt,
        at=NOW,
        limits=BatchLimits(32, 256, 8, 64),
        first_step_at=first_step_at,
        checkpointed=checkpointed,
    )


def room(free: dict[str, int] | None = None) -> Capacity:
    result = Capacity()
    result.free.update(free if free is not None else {"n1": 2, "n2": 4})
    return result


def act(the_move: Move, job: SlurmJob | None, rep: Report | None = None, **more: object) -> object:
    given: dict[str, object] = {
        "limits": MoveSettings(),
        "room": room(),
        "now": NOW,
        "waited": NOW - max(the_move.times.values()),
        **more,
    }
    where = given.pop("room")
    return next_action(the_move, job, rep, where, **given)  # type: ignore[arg-type]


def test_a_grow_drains_once_its_gpus_are_free() -> None:
    assert act(move(Step.PLANNED), slurm_job()) == Drain()
    assert act(move(Step.PLANNED), slurm_job(), room=room({"n1": 2, "n2": 3})) == Wait()


def test_a_first_start_configures_only_what_is_free_now() -> None:
    pending = slurm_job(JobState.PENDING)
    assert act(move(Step.PLANNED, "start"), pending, room=room({"n1": 4, "n2": 4})) == Configure()
    assert act(move(Step.PLANNED, "start"), pending) == Wait()


def test_the_fence_stops_a_move_of_an_older_attempt() -> None:
    assert isinstance(act(move(Step.PLANNED), slurm_job(restarts=1)), Fail)
    assert isinstance(act(move(Step.DRAINING), slurm_job(restarts=1)), Fail)
    assert isinstance(act(move(Step.CHECKPOINTED), slurm_job(restarts=1)), Fail)


@pytest.mark.parametrize("step", [s for s in Step if not s.terminal])
@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED])
def test_a_job_that_ended_is_never_requeued(step: Step, state: JobState) -> None:
    """Only the failure of a job counts as one of its move."""
    result = Fail if state is JobState.FAILED else Withdraw
    assert isinstance(act(move(step), slurm_job(state)), result)
    assert isinstance(act(move(step), None), Fail)


def test_the_agent_is_waited_for_then_given_up_on() -> None:
    running = slurm_job()
    assert act(move(Step.DRAINING), running) == Wait()
    assert act(move(Step.DRAINING, waited=30), running, None) == Wait()
    late = move(Step.DRAINING, waited=31)
    gone_back = act(late, running, report())
    assert isinstance(gone_back, Reach)
    assert gone_back.step is Step.CHECKPOINTED
    assert isinstance(act(late, running, report(checkpointed=False)), Fail)
    assert isinstance(act(late, running, None), Fail)


def test_a_drain_that_the_agent_refuses_leaves_the_job_running() -> None:
    """Its older checkpoint would undo what it has trained since."""
    draining = move(Step.DRAINING, waited=31)
    full = replace(report(), refused=draining.id, refused_why="no space left on device")
    ended = act(draining, slurm_job(), full)
    assert isinstance(ended, Fail)
    assert ended.reason == "the job's agent could not drain: no space left on device; left running"
    for other in (replace(full, refused=draining.id + 1), replace(full, attempt=3)):
        assert isinstance(act(draining, slurm_job(), other), Reach)


def test_a_job_that_left_a_drain_undone_is_requeued_all_the_same() -> None:
    draining = move(Step.DRAINING, waited=31)
    full = replace(report(checkpointed=False), refused=draining.id, refused_why="no")
    assert act(draining, slurm_job(), full).undrained
    ended = act(draining, slurm_job(), full, insist=True)
    assert isinstance(ended, Reach)
    assert ended.step is Step.CHECKPOINTED
    assert "could not drain: no, not for the first time" in ended.detail
    silent = report(checkpointed=False)
    assert act(draining, slurm_job(), silent).undrained
    assert isinstance(act(draining, slurm_job(), silent, insist=True), Reach)
    assert isinstance(act(move(Step.DRAINING, waited=2), slurm_job(), silent, insist=True), Wait)


def test_a_drain_that_nobody_looked_after_is_not_carried_out_later() -> None:
    stale = act(move(Step.DRAINING, waited=600), slurm_job(), report())
    assert isinstance(stale, Fail)
    assert "out of date" in stale.reason


def test_a_requeue_is_sent_once_and_only_repeated_when_it_shows_no_effect() -> None:
    the_move = move(Step.CHECKPOINTED)
    assert act(the_move, slurm_job()) == Requeue()
    assert act(the_move, slurm_job(), since_try=1.0) == Wait()
    assert act(the_move, slurm_job(JobState.COMPLETING)) == Wait()
    assert act(the_move, slurm_job(JobState.PENDING, restarts=1)) == Reach(Step.REQUEUED)


def test_a_start_whose_gpus_did_not_come_free_costs_the_job_no_rest() -> None:
    waiting = slurm_job(JobState.PENDING)
    late = act(move(Step.PLANNED, "start", waited=61), waiting, room=room({}))
    assert isinstance(late, Withdraw)
    assert not late.rest
    assert isinstance(act(move(Step.PLANNED, waited=61), slurm_job(), room=room({})), Fail)


def test_processes_that_do_not_end_are_not_waited_for_without_bound() -> None:
    completing = slurm_job(JobState.COMPLETING)
    for step in (Step.CHECKPOINTED, Step.REQUEUED):
        assert act(move(step, waited=100), completing) == Wait()
        stuck = act(move(step, waited=121), completing)
        assert isinstance(stuck, Fail)
        assert "did not end within 120 s" in stuck.reason


def test_a_stale_acknowledgement_is_not_acted_on() -> None:
    assert isinstance(act(move(Step.CHECKPOINTED, waited=100), slurm_job()), Fail)


def test_a_requeued_job_that_started_by_itself_and_was_suspended_is_not_waited_for() -> None:
    elsewhere = slurm_job(JobState.SUSPENDED, restarts=1, gpus_per_node_held={"n2": 1})
    assert isinstance(act(move(Step.REQUEUED), elsewhere), Fail)


def test_a_requeued_job_waits_for_the_next_second_and_for_its_gpus() -> None:
    pending = slurm_job(JobState.PENDING)
    free = room({"n1": 4, "n2": 4})
    assert act(move(Step.REQUEUED, waited=0.4), pending, room=free) == Wait()
    assert act(move(Step.REQUEUED, waited=0.6), pending, room=free) == Configure()
    assert act(move(Step.REQUEUED), pending, room=room({"n1": 4, "n2": 3})) == Wait()
    given_up = act(move(Step.REQUEUED, waited=121), pending, room=room({}))
    assert isinstance(given_up, Fail)
    assert given_up.keep_back


def test_a_job_does_not_wait_for_gpus_that_a_plain_job_has_taken() -> None:
    taken = room({"n1": 4, "n2": 0})
    taken.reach = {"n1": 4, "n2": 3}
    given_up = act(move(Step.REQUEUED), slurm_job(JobState.PENDING), room=taken)
    assert isinstance(given_up, Fail)
    assert given_up.keep_back
    assert not given_up.rest, "the next plan may place it elsewhere at once"
    for path, job in (("start", slurm_job(JobState.PENDING)), ("requeue", slurm_job())):
        withdrawn = act(move(Step.PLANNED, path), job, room=taken)
        assert isinstance(withdrawn, Withdraw)
        assert not withdrawn.rest
    taken.reach["n2"] = 4
    assert act(move(Step.REQUEUED), slurm_job(JobState.PENDING), room=taken) == Wait()


def test_a_parked_job_ends_its_move_in_the_queue() -> None:
    assert act(move(Step.REQUEUED, "park"), slurm_job(JobState.PENDING)) == Reach(Step.PARKED)


def test_a_start_is_confirmed_by_where_slurm_put_it() -> None:
    assert act(move(Step.CONFIGURED), slurm_job(at=TWO)) == Reach(Step.STARTED)
    assert isinstance(act(move(Step.CONFIGURED), slurm_job(at=ONE)), Fail)
    assert act(move(Step.CONFIGURED, waited=30), slurm_job(JobState.PENDING)) == Wait()
    lost = room()
    lost.reach["n2"] = 1
    taken = act(move(Step.CONFIGURED), slurm_job(JobState.PENDING), room=lost)
    assert isinstance(taken, Fail)
    assert (taken.keep_back, taken.rest) == (True, False)
    assert act(move(Step.CONFIGURED), slurm_job(at=TWO), room=lost) == Reach(Step.STARTED)
    stuck = act(move(Step.CONFIGURED, waited=31), slurm_job(JobState.PENDING, reason="Resources"))
    assert isinstance(stuck, Fail)
    assert stuck.keep_back
    assert "Resources" in stuck.reason


def test_training_is_confirmed_by_a_report_of_this_attempt() -> None:
    running = slurm_job(at=TWO, restarts=1)
    assert act(move(Step.STARTED), running, report(attempt=0)) == Wait()
    assert act(move(Step.STARTED), running, report(attempt=1, first_step_at=None)) == Wait()
    assert act(move(Step.STARTED), running, report(attempt=1)) == Reach(Step.TRAINING)
    silent = act(move(Step.STARTED, waited=121), running, None)
    assert isinstance(silent, Fail)
    assert "attach" in silent.reason


def test_pause_stops_what_has_not_begun_and_finishes_what_has() -> None:
    paused = act(move(Step.PLANNED), slurm_job(), paused=True)
    assert isinstance(paused, Withdraw)
    assert not paused.rest
    assert act(move(Step.CHECKPOINTED), slurm_job(), paused=True) == Requeue()


def test_a_users_hold_in_the_midst_of_a_move_is_obeyed() -> None:
    held_back = slurm_job(JobState.PENDING, held_by_user=True)
    assert isinstance(act(move(Step.REQUEUED), held_back), Fail)


def test_uneven_gpus_are_no_placement_of_ours() -> None:
    assert held(slurm_job(gpus_per_node_held={"n1": 4, "n2": 1})) is None
    assert held(slurm_job(JobState.PENDING)) == NO_PLACEMENT


def test_capacity_counts_what_is_held_configured_and_promised() -> None:
    running = slurm_job(at=ONE)
    waiting = replace(slurm_job(JobState.PENDING), job_id=8)
    configured = replace(move(Step.CONFIGURED, "start", target=Placement(("n2",), 3)), job_id=8)
    result = capacity(NODES, {7: running, 8: waiting}, [configured])
    assert result.free["n1"] == 2
    assert result.free["n2"] == 1
    leaving = capacity(NODES, {7: running}, [move(Step.CHECKPOINTED, "park")])
    assert leaving.fits_soon(Placement(("n1",), 4), NO_PLACEMENT, 8)
    assert not leaving.fits_now(Placement(("n1",), 4), 8)


def test_a_draining_grow_keeps_others_from_its_gpus() -> None:
    result = capacity(NODES, {7: slurm_job(at=ONE)}, [move(Step.DRAINING)])
    assert not result.fits_soon(Placement(("n2",), 1), NO_PLACEMENT, 8)


def test_intents_give_back_before_they_take() -> None:
    def job(job_id: int, at: Placement, **more: object) -> SnapshotJob:
        return replace(
            build.job(job_id, placement=at),
            **more,  # type: ignore[arg-type]
        )

    jobs = {
        1: job(1, NO_PLACEMENT),
        2: job(2, TWO),
        3: job(3, ONE),
        4: job(4, ONE, pinned=True),
        5: job(5, ONE),
    }
    wanted = {1: ONE, 2: ONE, 3: NO_PLACEMENT, 4: TWO, 5: ONE}
    plan = Plan(
        tuple(Allocation(j, p, 1.0, 1.0, 32, True, "why") for j, p in wanted.items()), 1.0, 1.0, "by hand"
    )
    assert [(i.job_id, i.path) for i in intents(plan, jobs)] == [(2, "requeue"), (3, "park"), (1, "start")]


def test_a_move_taken_back_ends_while_the_job_still_runs_and_not_later() -> None:
    def cancelled(step: Step, path: str = "requeue") -> Move:
        return replace(move(step, path), cancelled_by="ann@host")

    for step in (Step.PLANNED, Step.DRAINING, Step.CHECKPOINTED):
        assert act(cancelled(step), slurm_job(), report()) == Withdraw("cancelled by ann@host", rest=True)
    assert act(cancelled(Step.PLANNED, "start"), slurm_job(JobState.PENDING)) == Withdraw(
        "cancelled by ann@host", rest=True
    )
    free = room({"n1": 4, "n2": 4})
    assert act(cancelled(Step.REQUEUED), slurm_job(JobState.PENDING), room=free) == Configure()
    assert act(cancelled(Step.CHECKPOINTED), slurm_job(JobState.PENDING, restarts=1)) == Reach(Step.REQUEUED)


def test_a_job_that_may_not_start_again_is_not_requeued() -> None:
    for more, why in (({"held_by_user": True}, "on hold"), ({"deadline": NOW + 60}, "deadline")):
        running = replace(slurm_job(), **more)  # type: ignore[arg-type]
        for step in (Step.PLANNED, Step.DRAINING, Step.CHECKPOINTED):
            found = act(move(step), running, report())
            assert isinstance(found, Withdraw)
            assert why in found.reason


def test_a_job_whose_limit_is_used_up_is_not_requeued() -> None:
    drained = replace(move(Step.CHECKPOINTED), ends_at=NOW)
    assert isinstance(act(drained, slurm_job(), report()), Fail)
    assert act(drained, replace(slurm_job(), spec=JobSpec(continues=True)), report()) == Requeue()
    assert act(replace(drained, ends_at=NOW + 1), slurm_job(), report()) == Requeue()


def test_a_clock_set_back_ends_no_wait_early_and_prolongs_none() -> None:
    pending, free = slurm_job(JobState.PENDING), room({"n1": 4, "n2": 4})
    ahead = move(Step.REQUEUED, waited=-3600.0)  # requeued in what is now the future
    assert act(ahead, pending, room=free, waited=0.4) == Wait()
    assert act(ahead, pending, room=free, waited=1.5) == Configure()


def test_a_node_drained_in_the_meantime_is_no_target() -> None:
    nodes = (Node("n1", 4, schedulable=False), Node("n2", 4))
    smaller = move(Step.PLANNED, target=Placement(("n1",), 1))
    now = capacity(nodes, {7: slurm_job()}, [smaller])
    assert act(smaller, slurm_job(), room=now) == Wait()
    away = move(Step.PLANNED, target=Placement(("n2",), 2))
    assert act(away, slurm_job(), room=now) == Drain()


@pytest.mark.parametrize("step", [Step.REQUEUED, Step.CONFIGURED])
def test_a_job_that_its_user_makes_wait_for_another_keeps_no_gpus(step: Step) -> None:
    found = act(move(step), slurm_job(JobState.PENDING, dependent=True))
    assert isinstance(found, Fail)
    assert (found.keep_back, "Dependency" in found.reason) == (True, True)
