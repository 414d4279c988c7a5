"""The state machine of a move, action by action.

The capacity check keeps every intermediate state legal.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.actions import PAUSED, Action, Fail, Reach, Situation, Withdraw
from polluxd.apply.capacity import Capacity, capacity
from polluxd.apply.in_place import left_over
from polluxd.apply.machine import next_action
from polluxd.apply.placed import held
from polluxd.config.settings import MoveSettings
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Move, Node, Placement, Report, Step
from polluxd.slurm.protocol import SlurmJob
from tests import build
from tests.unit.apply.resized_job import BOTH, NODES, ONE, companion
from tests.unit.apply.resized_job import job as resized_job
from tests.unit.apply.resized_job import move as resize
from tests.unit.apply.resized_job import says as resize_report

PLANNED, DRAINING, RECRUITING = Step.PLANNED, Step.DRAINING, Step.RECRUITING
CHECKPOINTED, REQUEUED = Step.CHECKPOINTED, Step.REQUEUED
CONFIGURED, STARTED = Step.CONFIGURED, Step.STARTED
PENDING, RUNNING = JobState.PENDING, JobState.RUNNING
UNLAUNCHED = {"held_by_user": True, "reason": "launch failed requeued held"}
COMPLETING, SUSPENDED = JobState.COMPLETING, JobState.SUSPENDED
NOW = 1_000.5
SMALL, LARGE = Placement(("n1",), 2), Placement(("n1", "n2"), 4)
TWO_NODES = (Node("n1", 4), Node("n2", 4))
SHUT = {"room": Capacity(free=Counter(n1=2, n2=4), closed={"n2"})}


def said(action: Action) -> str:
    match action:
        case Reach(step, detail):
            return f"reach {step}: {detail}"
        case Withdraw(reason, rest):
            return f"withdraw{' rest' if rest else ''}: {reason}"
        case Fail(reason, keep_back, rest, undrained):
            marks = {"keep-back": keep_back, "no-rest": not rest, "undrained": undrained}
            return " ".join(["fail", *(mark for mark, there in marks.items() if there)]) + f": {reason}"
        case _:
            return action.name


def free(**gpus: int) -> Capacity:
    room = Capacity()
    room.free.update(gpus)
    return room


def reach(**gpus: int) -> Capacity:
    room = free(n1=2, n2=4)
    room.reach = gpus
    return room


def move(
    step: Step, path: str = "requeue", waited: float = 1.0, target: Placement = LARGE, **more: Any
) -> Move:
    source = NO_PLACEMENT if path == "start" else SMALL
    times = {step: NOW - waited}
    return build.move(path, source, NO_PLACEMENT if path == "park" else target, step, times, **more)


def slurm_job(state: JobState = RUNNING, at: Placement = SMALL, restarts: int = 0, **more: Any) -> SlurmJob:
    holds = state in (RUNNING, COMPLETING)
    return build.slurm_job(7, state, at if holds else NO_PLACEMENT, **{"restart_count": restarts, **more})


def report(attempt: int = 0, **more: Any) -> Report:
    limits = BatchLimits(32, 256, 8, 64)
    return Report(attempt, NOW, limits, **{"first_step_at": 1.0, "checkpointed": True, **more})


MUTE = report(1, first_step_at=None, immovable="mute")


def act(the_move: Move, job: SlurmJob | None, found: Report | None = None, **more: Any) -> str:
    waited = NOW - max(the_move.times.values())
    words = {"room": free(n1=2, n2=4), "limits": MoveSettings(), "now": NOW, "waited": waited, **more}
    return said(next_action(Situation(the_move, job, found, **words)))


FULL = {"refused": 1, "refused_why": "no space left on device"}
UNSAVED = report(checkpointed=False)
BACK, AHEAD = move(DRAINING, waited=500, target=Placement(("n1",), 1)), move(DRAINING, waited=500)
SOON = report(next_save_s=9.0)
WAITS = slurm_job(PENDING)
ROOM, NO_ROOM = free(n1=4, n2=4), free()
LOST = reach(n1=4, n2=3)
AFTER = {"restarts": 1, "at": LARGE}


@pytest.mark.parametrize(
    ("expected", "the_move", "job", "more"),
    [
        # A running job drains once its GPUs are free; a job that waits takes only what is free now.
        ("DRAIN", move(PLANNED), slurm_job(), {}),
        ("WAIT", move(PLANNED), slurm_job(), {"room": free(n1=2, n2=3)}),
        ("CONFIGURE", move(PLANNED, "start"), WAITS, {"room": ROOM}),
        ("WAIT", move(PLANNED, "start"), WAITS, {}),
        # A waiting job whose GPUs do not come free has lost nothing.
        ("withdraw: *did not come free*", move(PLANNED, "start", 61), WAITS, {"room": NO_ROOM}),
        ("fail: *did not come free*", move(PLANNED, "requeue", 61), slurm_job(), {"room": NO_ROOM}),
        # The fence stops a move of an older attempt.
        ("fail: *", move(PLANNED), slurm_job(restarts=1), {}),
        ("fail: *", move(DRAINING), slurm_job(restarts=1), {}),
        ("fail: *", move(CHECKPOINTED), slurm_job(restarts=1), {}),
        # A pause stops what has not begun, and finishes what has.
        (f"withdraw: {PAUSED}", move(PLANNED), slurm_job(), {"paused": True}),
        ("REQUEUE", move(CHECKPOINTED), slurm_job(), {"paused": True}),
        # The agent is waited for, then given up on.
        ("WAIT", move(DRAINING), slurm_job(), {}),
        ("WAIT", move(DRAINING, waited=30), slurm_job(), {}),
        ("reach checkpointed: *", move(DRAINING, waited=31), slurm_job(), {"found": report()}),
        ("fail undrained: *", move(DRAINING, waited=31), slurm_job(), {"found": UNSAVED}),
        # A trainer that saves by itself is no refuser: its next checkpoint is waited for, within an hour.
        ("WAIT", move(DRAINING, waited=500), slurm_job(), {"found": report(next_save_s=100.0)}),
        ("WAIT", move(DRAINING, waited=500), slurm_job(), {"found": report(next_save_s=1e9, checkpointed=False)}),
        ("reach checkpointed: *", move(DRAINING, waited=3601), slurm_job(), {"found": report(next_save_s=1e9)}),
        ("reach checkpointed: *", move(DRAINING, waited=31), slurm_job(), {"found": SOON, "insist": True}),
        # Ten minutes where others lack those GPUs, and not at all for one that is due later.
        ("WAIT", BACK, slurm_job(), {"found": report(next_save_s=39.0), "most": 2}),
        ("reach checkpointed: *", BACK, slurm_job(), {"found": report(next_save_s=41.0), "most": 2}),
        ("reach checkpointed: *", AHEAD, slurm_job(), {"found": report(next_save_s=41.0), "most": 8}),
        ("withdraw rest: *set aside*", AHEAD, slurm_job(), {"found": report(next_save_s=41.0), "most": 7}),
        ("fail undrained: *", move(DRAINING, waited=31), slurm_job(), {}),
        # A job that came to its end since: what runs in it now would run again from its start.
        ("withdraw rest: *any more: ended", move(DRAINING), slurm_job(), {"found": report(immovable="ended")}),
        ("WAIT", move(DRAINING), slurm_job(), {"found": report(immovable="ended"), "owed": True}),
        ("WAIT", move(DRAINING), slurm_job(), {"found": report(3, immovable="ended")}),
        ("fail: *out of date", move(DRAINING, waited=600), slurm_job(), {"found": report()}),
        # A drain that the agent refuses leaves the job running: its older checkpoint would undo its training since.
        (
            "fail undrained: the job's agent could not drain: no space left on device; left running",
            move(DRAINING, waited=31),
            slurm_job(),
            {"found": report(**FULL)},
        ),
        ("reach *", move(DRAINING, waited=31, id=2), slurm_job(), {"found": report(**FULL)}),
        ("reach *", move(DRAINING, waited=31), slurm_job(), {"found": report(3, **FULL)}),
        # A job that left a drain undone before is requeued all the same.
        (
            "reach checkpointed: *could not drain: no space left on device, not for the first time*",
            move(DRAINING, waited=31),
            slurm_job(),
            {"found": report(checkpointed=False, **FULL), "insist": True},
        ),
        (
            "reach checkpointed: *",
            move(DRAINING, waited=31),
            slurm_job(),
            {"found": UNSAVED, "insist": True},
        ),
        ("WAIT", move(DRAINING, waited=2), slurm_job(), {"found": UNSAVED, "insist": True}),
        # A requeue is sent once, and repeated only when it shows no effect.
        ("REQUEUE", move(CHECKPOINTED), slurm_job(), {}),
        ("WAIT", move(CHECKPOINTED), slurm_job(), {"since_try": 1.0}),
        ("WAIT", move(CHECKPOINTED), slurm_job(COMPLETING), {}),
        ("reach requeued: ", move(CHECKPOINTED), slurm_job(PENDING, restarts=1), {}),
        ("fail: *", move(CHECKPOINTED, waited=100), slurm_job(), {}),
        # Processes that do not end are not waited for without bound.
        ("WAIT", move(CHECKPOINTED, waited=100), slurm_job(COMPLETING), {}),
        ("WAIT", move(REQUEUED, waited=100), slurm_job(COMPLETING), {}),
        ("fail: *did not end within 120 s*", move(CHECKPOINTED, waited=121), slurm_job(COMPLETING), {}),
        ("fail: *did not end within 120 s*", move(REQUEUED, waited=121), slurm_job(COMPLETING), {}),
        # A job whose time limit is used up is not requeued.
        ("fail: *", move(CHECKPOINTED, ends_at=NOW), slurm_job(), {}),
        ("REQUEUE", move(CHECKPOINTED, ends_at=NOW), slurm_job(spec=JobSpec(continues=True)), {}),
        ("REQUEUE", move(CHECKPOINTED, ends_at=NOW + 1), slurm_job(), {}),
        ("REQUEUE", move(CHECKPOINTED, ends_at=NOW - 121), slurm_job(), {}),
        # A requeued job waits for the next second, and for its GPUs.
        ("fail: *suspended*", move(REQUEUED), slurm_job(SUSPENDED, gpus_per_node_held={"n2": 1}), {}),
        ("WAIT", move(REQUEUED, waited=0.4), WAITS, {"room": ROOM}),
        ("CONFIGURE", move(REQUEUED, waited=0.6), WAITS, {"room": ROOM}),
        ("WAIT", move(REQUEUED), WAITS, {"room": free(n1=4, n2=3)}),
        ("fail keep-back: *", move(REQUEUED, waited=121), WAITS, {"room": NO_ROOM}),
        ("reach parked: ", move(REQUEUED, "park"), WAITS, {}),
        # A clock that was set back ends no wait early and prolongs none.
        ("WAIT", move(REQUEUED, waited=-3600.0), WAITS, {"room": ROOM, "waited": 0.4}),
        ("CONFIGURE", move(REQUEUED, waited=-3600.0), WAITS, {"room": ROOM, "waited": 1.5}),
        # A job does not wait for GPUs that a plain job has taken: the next plan may place it elsewhere at once.
        ("fail keep-back no-rest: *", move(REQUEUED), WAITS, {"room": LOST}),
        ("withdraw: *", move(PLANNED, "start"), WAITS, {"room": LOST}),
        ("withdraw: *", move(PLANNED), slurm_job(), {"room": LOST}),
        ("WAIT", move(REQUEUED), WAITS, {"room": reach(n1=4, n2=4)}),
        # A job that has just started may look like a plain job's GPUs.
        ("WAIT", move(CONFIGURED), WAITS, {"room": LOST}),
        ("fail keep-back no-rest: *", move(CONFIGURED, waited=5), WAITS, {"room": LOST}),
        ("reach started: ", move(CONFIGURED), slurm_job(at=LARGE), {"room": LOST}),
        # A start is confirmed by where Slurm put it. A refusal ends it at once, and a busy node does not.
        ("reach started: ", move(CONFIGURED), slurm_job(at=LARGE), {}),
        ("fail: *", move(CONFIGURED), slurm_job(), {}),
        ("WAIT", move(CONFIGURED, waited=30), WAITS, {}),
        ("fail keep-back: *Resources*", move(CONFIGURED, waited=31), slurm_job(PENDING, reason="Resources"), {}),
        ("fail keep-back: *", move(CONFIGURED, waited=5), slurm_job(PENDING, reason="AssocGrpGRES"), {}),
        ("WAIT", move(CONFIGURED), slurm_job(PENDING, reason="AssocGrpGRES"), {}),
        # Nobody took the GPUs, and Slurm does not start the job: that is a refusal, too.
        ("fail keep-back: *Resources", move(CONFIGURED, waited=5), slurm_job(PENDING, reason="Resources"), {}),
        ("WAIT", move(CONFIGURED, waited=5), slurm_job(PENDING, reason="Resources"), {"room": free(n1=-1)}),
        ("WAIT", move(CONFIGURED, waited=5), slurm_job(PENDING, reason="Priority"), {}),
        # A trainer that requeues itself once it has saved.
        ("WAIT", move(DRAINING), slurm_job(COMPLETING, restarts=1), {}),
        # Training is confirmed by a report of this attempt.
        ("WAIT", move(STARTED), slurm_job(**AFTER), {"found": report()}),
        ("WAIT", move(STARTED), slurm_job(**AFTER), {"found": MUTE}),
        ("WAIT", move(STARTED), slurm_job(**AFTER), {"found": report(1, first_step_at=None)}),
        ("reach training: ", move(STARTED), slurm_job(**AFTER), {"found": report(1)}),
        ("fail: *attach*", move(STARTED, waited=121), slurm_job(**AFTER), {}),
        ("withdraw: *cannot be moved: mute", move(STARTED, waited=121), slurm_job(**AFTER), {"found": MUTE}),
        # A user's hold during a move is obeyed, and a job made to wait for another one keeps no GPUs.
        ("fail: *held*", move(REQUEUED), slurm_job(PENDING, held_by_user=True), {}),
        ("fail keep-back: *Dependency*", move(REQUEUED), slurm_job(PENDING, dependent=True), {}),
        ("fail keep-back: *Dependency*", move(CONFIGURED), slurm_job(PENDING, dependent=True), {}),
        # Slurm's own hold, after a node failed at its start, is no user's; that of a first start stays.
        ("fail keep-back: *launch failed*", move(STARTED), slurm_job(PENDING, **UNLAUNCHED), {}),
        ("fail: *held*", move(STARTED, "start"), slurm_job(PENDING, **UNLAUNCHED), {}),
        # A node of the target that is drained in mid-move starts no job: back to the former place, in seconds.
        ("fail keep-back no-rest: *starts no job*", move(REQUEUED, waited=5), WAITS, SHUT),
        ("fail keep-back no-rest: *starts no job*", move(CONFIGURED, waited=5), WAITS, SHUT),
        ("fail keep-back no-rest: *starts no job*", move(REQUEUED, waited=1), WAITS, SHUT),
        ("WAIT", move(CONFIGURED, waited=1), WAITS, SHUT),
        # A requeue would undo an administrator's `scontrol suspend`.
        ("withdraw rest: *suspended*", move(DRAINING, waited=31), slurm_job(SUSPENDED), {"found": report()}),
        ("withdraw rest: *suspended*", move(CHECKPOINTED), slurm_job(SUSPENDED), {}),
        # Before it is requeued, it trains on.
        ("withdraw: *starts no job*", move(DRAINING), slurm_job(), SHUT),
        ("withdraw: *starts no job*", move(CHECKPOINTED), slurm_job(), SHUT),
        ("withdraw: *outside Pollux*", move(DRAINING), slurm_job(), {"room": LOST}),
        ("withdraw: *outside Pollux*", move(CHECKPOINTED), slurm_job(), {"room": LOST}),
        # A limit needs no second look, where the job cannot show an older one.
        ("fail keep-back: *QOSMax*", move(CONFIGURED, waited=1.5), slurm_job(PENDING, reason="QOSMaxGRESPerJob"), {}),
        ("WAIT", move(CONFIGURED, "start", waited=1.5), slurm_job(PENDING, reason="QOSMaxGRESPerJob"), {}),
        ("WAIT", move(CONFIGURED, waited=1.5), slurm_job(PENDING, reason="Resources"), {}),
        # What was taken back ends while the job still runs, and not later.
        ("withdraw rest: cancelled by ann", move(PLANNED, "start", cancelled_by="ann"), WAITS, {}),
        ("CONFIGURE", move(REQUEUED, cancelled_by="ann"), WAITS, {"room": ROOM}),
        ("reach requeued: ", move(CHECKPOINTED, cancelled_by="ann"), slurm_job(PENDING, restarts=1), {}),
        ("reach requeued: ", move(CHECKPOINTED), slurm_job(PENDING, restarts=1), {"forbidden": "rule"}),
    ],
)  # fmt: skip
def test_through_the_queue(expected: str, the_move: Move, job: SlurmJob, more: dict[str, Any]) -> None:
    assert fnmatchcase(found := act(the_move, job, **more), expected), found


@pytest.mark.parametrize("step", [PLANNED, DRAINING, CHECKPOINTED])
def test_a_move_is_withdrawn_while_the_job_runs(step: Step) -> None:
    for job, the_move, more, why in (
        (slurm_job(held_by_user=True), move(step), {}, ": *on hold*"),
        (slurm_job(deadline=NOW + 60), move(step), {}, ": *deadline*"),
        (slurm_job(), move(step, cancelled_by="ann@host"), {}, " rest: cancelled by ann@host"),
        (slurm_job(), move(step), {"forbidden": "partition main is DOWN"}, ": *could not start there"),
    ):
        assert fnmatchcase(act(the_move, job, report(), **more), f"withdraw{why}")
    assert not act(move(step), slurm_job(), report()).startswith("withdraw")
    owed = act(move(step), slurm_job(held_by_user=True), report(), forbidden="rule", owed=True)
    assert not owed.startswith("withdraw"), "nobody keeps more than an equal share by a hold"


@pytest.mark.parametrize("step", [s for s in Step if not s.terminal])
@pytest.mark.parametrize("state", [JobState.COMPLETED, JobState.CANCELLED, JobState.FAILED])
def test_a_job_that_ended_is_never_requeued(step: Step, state: JobState) -> None:
    """Only the failure of a job counts as one of its move."""
    result = "fail" if state is JobState.FAILED else "withdraw"
    assert act(move(step), slurm_job(state)).startswith(f"{result}: ")
    assert act(move(step), None).startswith("fail: ")


def test_uneven_gpus_are_no_placement_of_ours() -> None:
    assert held(slurm_job(gpus_per_node_held={"n1": 4, "n2": 1})) is None
    assert held(WAITS) == NO_PLACEMENT


def test_capacity_counts_what_is_held_configured_and_promised() -> None:
    configured = move(CONFIGURED, "start", target=Placement(("n2",), 3), job_id=8)
    jobs = {7: slurm_job(), 8: replace(WAITS, job_id=8)}
    assert capacity(TWO_NODES, jobs, [configured]).free == {"n1": 2, "n2": 1}
    leaving = capacity(TWO_NODES, {7: slurm_job()}, [move(CHECKPOINTED, "park")])
    assert leaving.fits_soon(Placement(("n1",), 4), NO_PLACEMENT, 8)
    assert not leaving.fits_now(Placement(("n1",), 4), 8)
    draining = capacity(TWO_NODES, {7: slurm_job()}, [move(DRAINING)])
    assert not draining.fits_soon(Placement(("n2",), 1), NO_PLACEMENT, 8), "a grow keeps others from its GPUs"
    smaller = capacity(TWO_NODES, {7: slurm_job()}, [move(DRAINING, target=Placement(("n1",), 1))])
    assert not smaller.fits_soon(Placement(("n1",), 3), NO_PLACEMENT, 8), "its agent may refuse to shrink"


def test_a_node_drained_in_the_meantime_is_no_target() -> None:
    nodes = (Node("n1", 4, schedulable=False), Node("n2", 4))
    smaller = move(PLANNED, target=Placement(("n1",), 1))
    now = capacity(nodes, {7: slurm_job()}, [smaller])
    assert fnmatchcase(act(smaller, slurm_job(), room=now), "withdraw: *starts no job*")
    assert act(move(PLANNED, target=Placement(("n2",), 2)), slurm_job(), room=now) == "DRAIN"


# --- in place ---

ALL_FREE = {"room": capacity(NODES, {}, [])}
NONE_FREE = {"room": capacity([replace(n, foreign_gpus=4) for n in NODES], {}, [])}
CLOSED = {"room": Capacity(closed={"n2"})}
LENT, UNLENT = {"companion": companion(("n2",))}, {"companion": companion(state=PENDING)}
NO = {"report": resize_report(refused=5, refused_why="sbatch is forbidden")}


def shrunk(**more: Any) -> dict[str, Any]:
    """The job has given its node back, and its agent reports so."""
    return {"job": resized_job(ONE), **({"report": resize_report(**more)} if more else {})}


@pytest.mark.parametrize(
    ("expected", "grow", "step", "more"),
    [
        # A shrink waits for nobody's GPUs, and then for its agent: no checkpoint stands in for ranks that stay.
        ("DRAIN", False, PLANNED, NONE_FREE),
        ("WAIT", False, DRAINING, {}),
        ("fail undrained: *did not shrink*", False, DRAINING, {"report": report(), "waited": 31.0}),
        # Nodes are given back after the ranks have left, and the end is reported.
        ("GIVE_BACK", False, CHECKPOINTED, {}),
        ("WAIT", False, CHECKPOINTED, {"since_try": 1.0}),
        ("reach configured: ", False, CHECKPOINTED, shrunk()),
        ("fail: *", False, CHECKPOINTED, {"waited": 61.0}),
        ("WAIT", False, CONFIGURED, shrunk(resized=4)),
        ("reach training: ", False, CONFIGURED, shrunk(resized=5)),
        ("WAIT", False, CONFIGURED, shrunk(resized=5, attempt=1)),
        ("fail: *", False, CONFIGURED, {**shrunk(), "waited": 121.0}),
        # A grow starts when its GPUs are free; until then nothing was asked of the job.
        ("RECRUIT", True, PLANNED, {}),
        ("WAIT", True, PLANNED, NONE_FREE),
        ("withdraw: *", True, PLANNED, {**NONE_FREE, "waited": 61.0}),
        # A companion is placed, watched, and joins.
        ("WAIT", True, RECRUITING, {}),
        ("PLACE", True, RECRUITING, UNLENT),
        ("WAIT", True, RECRUITING, {**UNLENT, **CLOSED}),
        ("fail: *", True, RECRUITING, {**UNLENT, **CLOSED, "waited": 61.0}),
        ("fail: *", True, RECRUITING, {"waited": 61.0}),
        ("reach configured: *lost", True, RECRUITING, LENT),
        ("WAIT", True, CONFIGURED, UNLENT),
        ("reach started: ", True, CONFIGURED, LENT),
        ("fail: *", True, CONFIGURED, {**UNLENT, "waited": 31.0}),
        ("WAIT", True, STARTED, {**LENT, "report": resize_report(resized=4)}),
        ("reach training: ", True, STARTED, {**LENT, "report": resize_report(resized=5)}),
        ("fail: *", True, STARTED, {**LENT, "waited": 121.0}),
        # What the agent refuses is not waited for, and an earlier refusal is.
        ("fail: the job's agent could not: sbatch is forbidden", True, RECRUITING, NO),
        ("fail: the job's agent could not: sbatch is forbidden", True, STARTED, NO),
        ("fail undrained: the job's agent could not: sbatch is forbidden", False, DRAINING, NO),
        ("WAIT", True, RECRUITING, {"report": resize_report(refused=4)}),
        ("WAIT", True, RECRUITING, {"report": resize_report(refused=5, attempt=1)}),
        ("GIVE_BACK", False, CHECKPOINTED, NO),  # its ranks have left
        # A move is taken back until the point of no return, and paused before it began.
        ("withdraw rest: *", False, PLANNED, {"cancelled_by": "ann"}),
        ("withdraw rest: *", False, DRAINING, {"cancelled_by": "ann"}),
        ("GIVE_BACK", False, CHECKPOINTED, {"cancelled_by": "ann"}),
        ("withdraw rest: *", True, RECRUITING, {**UNLENT, "cancelled_by": "ann"}),
        ("withdraw rest: *", True, CONFIGURED, {**UNLENT, "cancelled_by": "ann"}),
        ("reach started: ", True, CONFIGURED, {**LENT, "cancelled_by": "ann"}),
        ("WAIT", True, STARTED, {**LENT, "cancelled_by": "ann"}),
        (f"withdraw: {PAUSED}", False, PLANNED, {"paused": True}),
        (f"withdraw: {PAUSED}", True, RECRUITING, {**UNLENT, "paused": True}),
        ("WAIT", True, CONFIGURED, {**UNLENT, "paused": True}),
        # A move from where the job is no longer is not begun.
        ("withdraw: *", True, PLANNED, {"job": resized_job(Placement(("n1", "n3"), 4))}),
        ("withdraw: *", False, PLANNED, {"job": resized_job(Placement(("n1", "n3"), 4))}),
        # A companion that is not what was asked for ends the move.
        *(
            ("fail: *", True, step, {"companion": lent})
            for step in (CONFIGURED, STARTED)
            for lent in (
                companion(("n3",)),
                companion(("n2",), COMPLETING),
                companion(("n2",), SUSPENDED),
                companion(state=PENDING, held_by_user=True),
                None,
            )
        ),
        ("fail: *went back to the queue", True, STARTED, UNLENT),
        # The allocation goes, and the move with it.
        *(
            ("fail: *", False, step, {"job": gone})
            for step in (DRAINING, CHECKPOINTED, CONFIGURED)
            for gone in (
                resized_job(BOTH, COMPLETING),
                resized_job(Placement(), PENDING),
                resized_job(BOTH, restart_count=1),
                resized_job(BOTH, SUSPENDED),
            )
        ),
    ],
)
def test_in_place(expected: str, grow: bool, step: Step, more: dict[str, Any]) -> None:
    the_move = resize(step, grow=grow, cancelled_by=more.get("cancelled_by", ""))
    words = {name: value for name, value in more.items() if name not in ("cancelled_by", "job", "report")}
    job = more.get("job") or resized_job(the_move.source)
    found = act(the_move, job, more.get("report"), **{**ALL_FREE, "waited": 1.0, **words})
    assert fnmatchcase(found, expected), found


def test_what_comes_in_is_set_aside_and_what_leaves_is_free_when_slurm_shows_it() -> None:
    jobs, arriving, there = {7: resized_job(ONE)}, Placement(("n2",), 4), companion(("n2",))
    coming = capacity(NODES, jobs, [resize(RECRUITING, grow=True)])
    assert coming.free == {"n1": 0, "n2": 0, "n3": 4}
    assert coming.kept(arriving)
    arrived = capacity(NODES, jobs, [resize(STARTED, grow=True)], pending_companions={5: there})
    assert arrived.free == {"n1": 0, "n2": 0, "n3": 4}
    assert not capacity(NODES, jobs, [resize(RECRUITING, grow=True)], orphans=[there]).kept(arriving)
    leaving = capacity(NODES, {7: resized_job(BOTH)}, [resize(CHECKPOINTED, grow=False)])
    assert (leaving.free["n2"], leaving.fits_soon(arriving, Placement(), 8)) == (0, True)
    may_stay = capacity(NODES, {7: resized_job(BOTH)}, [resize(DRAINING, grow=False)])
    assert not may_stay.fits_soon(arriving, Placement(), 8)


def test_a_shrink_that_was_carried_out_although_it_failed_leaves_something_over() -> None:
    failed, done = resize(Step.FAILED, grow=False), resize_report(resized=5)
    gone = replace(failed, target=Placement(("n1", "n3"), 4))  # a companion on n3 is gone too
    for left in (failed, gone):
        assert left_over(resized_job(BOTH), done, {5: left}) == left
    for job, found, of_move in (
        (resized_job(ONE), done, failed),
        (resized_job(BOTH), resize_report(resized=4), failed),
        (resized_job(BOTH, restart_count=1), done, failed),
        (resized_job(BOTH), resize_report(resized=5, attempt=1), failed),
        (resized_job(BOTH), done, replace(failed, job_id=8)),
        (resized_job(BOTH), done, replace(failed, step=Step.TRAINING)),
        (resized_job(BOTH), done, resize(Step.FAILED, grow=True)),
    ):
        assert left_over(job, found, {5: of_move}) is None
