"""Decide what to do next about one move.

The decision is a pure function of the move, Slurm's present state, the agent's report, and the time (`Situation`).

The fence is (job id, restart count): a move acts only on the attempt that it was planned for. Every action is safe to
repeat, so that a daemon killed between any two lines finishes the move on its next start.

    requeue:  planned -> draining -> checkpointed -> requeued -> configured -> started -> training
    start:    planned -> configured -> started -> training
    park:     planned -> draining -> checkpointed -> requeued -> parked
    shrink:   planned -> draining -> checkpointed -> configured -> training
              The agent makes the ranks on the nodes to give back leave, and acknowledges; then Slurm takes the nodes.
    grow:     planned -> recruiting -> configured -> started -> training
              The agent submits a companion job; polluxd places it on the new nodes; its ranks join.

In the last two the job is resized in place. Until the agent has acknowledged (shrink) or has reported the joining
ranks' first step (grow), the job trains on its old nodes, and a move that fails costs the job nothing. Any event that
no case here handles (a node fails, somebody requeues the job) ends the move; `companions.gather` and
`in_place.left_over` then find leftover companions and nodes.
"""

from __future__ import annotations

from math import floor

from polluxd.apply.actions import (
    JOINER_FAILED,
    PAUSED,
    REFUSED_START,
    WAITED,
    WENT_BACK,
    Action,
    Do,
    Fail,
    Reach,
    Situation,
    Withdraw,
)
from polluxd.apply.capacity import Capacity, goes_back
from polluxd.apply.own_rhythm import CONTESTED_S, LATE_S, LONGEST_S, due_at
from polluxd.apply.placed import OVERRUN_S, held, same_place
from polluxd.apply.startable import of_limit, refused
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import LAUNCH_FAILED

ACKNOWLEDGED_S = 90.0
"""Agents wait 120 s to be killed and then train on: an acknowledgement older than this is stale."""
REPEAT_S = 3.0
"""A call to Slurm that shows no effect is made again after this time."""
REFUSED_S = 4.0
"""Slurm's scheduler has looked at a configured job by then."""
LIMIT_S = 1.0
"""And this is what it takes to see that a limit keeps it out, once no older reason can be shown."""

FAILED_AT_ONCE_S = 10.0
"""An attempt that fails so soon, and before its agent reported, is run once more: Slurm may have ended it."""


def next_action(at: Situation) -> Action:
    """Return the next action of the move."""
    move, job = at.move, at.job
    if job is None:
        return Fail("the job is no longer known to Slurm")
    if (end := _ended(at, job) or _taken_back(at, job)) is not None:
        return end
    if move.in_allocation:
        return _in_place(at, job)
    match move.step:
        case Step.PLANNED:
            return _planned(at, job)
        case Step.DRAINING:
            return _draining(at, job)
        case Step.CHECKPOINTED:
            return _checkpointed(at, job)
        case Step.REQUEUED:
            return _requeued(at, job)
        case Step.CONFIGURED:
            return _configured(at, job)
        case Step.STARTED:
            return _started(at, job)
        case _:
            return Do.WAIT


def _ended(at: Situation, job: SlurmJob) -> Action | None:
    """Return the action that ends a move of any kind, at any step."""
    move = at.move
    if _failed_to_start(at, job):
        return Do.RUN_AGAIN
    if job.state.finished:
        ended = f"the job ended ({job.raw_state}) during the move"
        # A short job, or its user: the move did nothing wrong.
        return Fail(ended) if job.state is JobState.FAILED else Withdraw(ended)
    if job.state is JobState.PENDING and move.step is not Step.PLANNED:
        if job.reason == LAUNCH_FAILED and move.path == "requeue":
            return Fail(f"{REFUSED_START}: {job.reason}", keep_back=True, refused=job.reason)
        if job.held_by_user:
            return Fail("the job was held (scontrol hold) during the move")
        if job.dependent:
            return Fail("the job was made to wait for another one (Dependency)", keep_back=True)
    if job.state is JobState.SUSPENDED and not move.in_allocation and move.revocable:
        # A requeue would undo what an administrator, or preemption, has done; it goes on where it is.
        return Withdraw("the job was suspended during the move", rest=True)
    return None


def _failed_to_start(at: Situation, job: SlurmJob) -> bool:
    """Tell whether the attempt of a training that polluxd has moved failed before its agent could report.

    Slurm ends a start so if the job's credential was revoked, if a Prolog failed, or if no container could be joined.
    The record of a script that fails at once looks the same, so polluxd runs such a script once more, and no second
    time: the attempt before has to have trained.
    """
    move, report = at.move, at.report
    attempt = -1 if report is None else report.attempt
    if move.path == "requeue":
        trained = job.restart_count == move.attempt + 1 and attempt < job.restart_count
    else:
        trained = move.path == "start" and report is not None and report.first_step_at is not None
        trained = trained and attempt == job.restart_count - 1
    return (
        trained
        and job.raw_state == "FAILED"
        and move.step in (Step.REQUEUED, Step.CONFIGURED, Step.STARTED)
        and job.start_time is not None
        and job.end_time is not None
        and job.end_time - job.start_time <= FAILED_AT_ONCE_S
    )


def _taken_back(at: Situation, job: SlurmJob) -> Action | None:
    """Withdraw a move that can still be taken back. `_in_place` itself obeys `cancelled_by`."""
    move, runs = at.move, job.state is JobState.RUNNING
    if not move.revocable or (move.step is not Step.PLANNED and (move.in_allocation or not runs)):
        return None
    if at.forbidden and not at.owed:
        return Withdraw(f"{at.forbidden}; the job could not start there")
    if move.in_allocation:
        return None
    if runs and job.held_by_user and not at.owed:
        why = "the job is on hold (scontrol hold): it would not start again"
        return Withdraw(why, undrained=move.gives_back)
    if runs and job.deadline is not None:
        return Withdraw("the job has a deadline: Slurm could end it before its start")
    if runs and not at.owed and at.room.lost(move.target):
        return Withdraw(_lost(at.room, move))
    return Withdraw(f"cancelled by {move.cancelled_by}", rest=True) if move.cancelled_by else None


def _wait(at: Situation, limit_s: float, late: Fail | Withdraw) -> Action:
    return late if at.waited > limit_s else Do.WAIT


# --- through the queue ---


def _planned(at: Situation, job: SlurmJob) -> Action:
    move, room, limit = at.move, at.room, at.limits.planned_timeout_s
    if job.restart_count != move.attempt:
        return Fail(f"the job restarted (attempt {job.restart_count}) after the move was planned")
    if at.paused:
        return Withdraw(PAUSED)
    if move.path == "start" and room.out_of_reach(move.target):
        return Withdraw(_lost(room, move))
    if at.waited > limit:
        late = _not_free(move, limit)
        # A waiting job has lost nothing and must not wait longer because of it: no cooldown.
        return Fail(late) if move.source else Withdraw(late)
    if move.path == "start":
        if same_place(job, move.target):
            return Reach(Step.CONFIGURED, "the answer to its start had been lost")
        if job.state is not JobState.PENDING:
            return Fail(f"the job started on its own ({job.raw_state})")
        if job.held_by_user:
            return Fail("the job was held (scontrol hold)")
        if job.dependent:
            return Withdraw("the job was made to wait for another one (Dependency)")
        if goes_back(move) and (at.kept_off or _too_soon(at, Step.PLANNED)):
            return Do.WAIT
        return Do.CONFIGURE if room.fits_now(move.target, move.job_id) else Do.WAIT
    if job.state is not JobState.RUNNING:
        return Fail(f"the job is {job.raw_state}, no longer running")
    return Do.DRAIN if room.fits_soon(move.target, move.source, move.job_id) else Do.WAIT


def _lost(room: Capacity, move: Move) -> str:
    if room.out_of_reach(move.target):
        return f"GPUs of {move.target} went to a job outside Pollux, or the node has fewer now"
    return f"a node of {move.target} starts no job any more (drained or down)"


def _not_free(move: Move, limit_s: float) -> str:
    return f"the GPUs of {move.added or move.target} did not come free within {limit_s:.0f} s"


def _draining(at: Situation, job: SlurmJob) -> Action:
    report, limit = at.report, at.limits.drain_timeout_s
    due = due_at(report, job.restart_count)
    rhythm = limit if due is None else max(limit, min(at.waited + due + LATE_S - at.now, LONGEST_S))
    if not at.insist and (rhythm <= CONTESTED_S or at.most is None):
        limit = rhythm  # a wait in vain would add to what is trained again
    if job.state is JobState.PENDING:
        return Reach(Step.REQUEUED, "requeued by a user or administrator while draining")
    if job.state is JobState.COMPLETING and job.restart_count == at.move.attempt + 1:
        return _completing(at)  # a trainer that requeues itself once it has saved
    if job.restart_count != at.move.attempt:
        return Fail("the job restarted while draining")
    if report is not None and report.attempt == job.restart_count and report.refused == at.move.id:
        # A return to its older checkpoint would lose the training since then.
        return _undrained(at, f"the job's agent could not drain: {report.refused_why or 'no reason given'}")
    if report is not None and report.attempt == job.restart_count and report.immovable and not at.owed:
        why = f"the job cannot be moved any more: {report.immovable}"
        return Withdraw(why, rest=True, undrained=at.move.gives_back)
    if at.waited > rhythm + ACKNOWLEDGED_S:
        return Fail("left draining while polluxd was away or not acting: the plan is out of date")
    if at.waited <= limit:
        return Do.WAIT
    late = f"no acknowledgement in {limit:.0f} s"
    if at.most is not None and at.move.target.gpus > at.most and not at.move.gives_back:
        return Withdraw(f"{late}, and others wait for the GPUs that were set aside for it", rest=True)
    if report is not None and report.checkpointed:
        return Reach(Step.CHECKPOINTED, f"{late}: the previous checkpoint stands")
    return _undrained(at, f"{late} and no checkpoint to go back to")


def _undrained(at: Situation, why: str) -> Action:
    if not at.insist:
        return Fail(f"{why}; left running", undrained=True)
    return Reach(
        Step.CHECKPOINTED,
        f"{why}, not for the first time, and its user holds more than an equal share: requeued all the same",
    )


def _checkpointed(at: Situation, job: SlurmJob) -> Action:
    ends_at = at.move.ends_at
    if job.state is JobState.PENDING:
        return Reach(Step.REQUEUED)
    if job.state is JobState.COMPLETING:
        return _completing(at)
    if job.restart_count != at.move.attempt:
        return Fail("the job restarted before it was requeued")
    if at.waited > ACKNOWLEDGED_S:
        return Fail("the checkpoint was acknowledged too long ago: the job has gone on training")
    if (
        ends_at is not None
        and 0 <= at.now - ends_at < OVERRUN_S
        and not (job.spec is not None and job.spec.continues)
    ):
        # Slurm ends it within a minute. A new attempt would have a whole minute once more.
        return Fail("its time limit is used up: left to Slurm, which ends it")
    return Do.REQUEUE if at.since_try > REPEAT_S else Do.WAIT


def _completing(at: Situation) -> Action:
    """Slurm waits for processes that cannot be killed for as long as it takes."""
    limit = at.limits.requeued_timeout_s
    return _wait(at, limit, Fail(f"its processes did not end within {limit:.0f} s of the requeue"))


def _requeued(at: Situation, job: SlurmJob) -> Action:
    move, limit = at.move, at.limits.requeued_timeout_s
    if job.state is JobState.RUNNING:
        if same_place(job, move.target):
            return Reach(Step.CONFIGURED)
        return Fail(f"the job started on {held(job)} instead of {move.target}")
    if job.state is JobState.SUSPENDED:
        return Fail(f"the job started on its own, on {held(job)}, and was suspended there")
    if job.state is not JobState.PENDING:
        return _completing(at)
    if move.path == "park":
        return Reach(Step.PARKED)
    if at.room.lost(move.target):
        return Fail(_lost(at.room, move), keep_back=True, rest=False)
    if at.kept_off:
        return Do.WAIT
    if at.waited > limit:
        return Fail(_not_free(move, limit), keep_back=True)
    if _too_soon(at, Step.REQUEUED):
        return Do.WAIT
    return Do.CONFIGURE if at.room.fits_now(move.target, move.job_id) else Do.WAIT


def _too_soon(at: Situation, step: Step) -> bool:
    """Tell whether the job, back in the queue since a step, may not start on the same node yet.

    A start in the second of the requeue fails with "Job credential revoked" (1 in 8). If the clock was set back since,
    that second may be far off, or come again: a whole one has to pass then.
    """
    back_at = at.move.times.get(step, at.now)
    return floor(at.now) == floor(back_at) or (at.now < back_at and at.waited <= 1.0)


def _configured(at: Situation, job: SlurmJob) -> Action:
    move, limit = at.move, at.limits.start_timeout_s
    if job.state in (JobState.RUNNING, JobState.COMPLETING):
        if same_place(job, move.target):
            return Reach(Step.STARTED)
        return Fail(f"Slurm started the job on {held(job)} instead of {move.target}")
    if at.waited > REFUSED_S and at.room.lost(move.target):
        # It is bound to these nodes, and others may be free. Earlier, it may just have started: squeue is read before
        # the nodes, and beside a plain job its GPUs then look like more of the plain job's.
        return Fail(_lost(at.room, move), keep_back=True, rest=False)
    # A job that has just been requeued has met no limit before this one.
    looked_at = LIMIT_S if move.path == "requeue" and of_limit(job.reason) else REFUSED_S
    if at.waited > looked_at and refused(job.reason, free=at.room.kept(move.target)):
        why = f"{REFUSED_START}: {job.reason}"
        return Fail(why, keep_back=True, refused=job.reason)
    late = f"not started within {limit:.0f} s; Slurm says {job.reason!r}"
    if move.path == "requeue" and at.room.kept(move.target):
        # Whatever it waits for: its training is not stopped for the same again.
        why = f"{WAITED}{limit:.0f} s ({job.reason})"
        return _wait(at, limit, Fail(f"{REFUSED_START}: {why}", keep_back=True, refused=why))
    return _wait(at, limit, Fail(late, keep_back=True))


def _started(at: Situation, job: SlurmJob) -> Action:
    report, limit = at.report, at.limits.training_timeout_s
    if job.state is JobState.PENDING:
        grows = at.move.path == "requeue" and at.move.target.gpus > at.move.source.gpus
        return Fail(WENT_BACK, keep_back=True, refused=WENT_BACK if grows else "")
    if job.state is JobState.COMPLETING:
        # It ends, or goes back to the queue: its processes, or an epilog, may take long.
        late = f"its processes did not end within {limit + at.limits.requeued_timeout_s:.0f} s of its start"
        return _wait(at, limit + at.limits.requeued_timeout_s, Fail(late))
    if report is not None and report.attempt == job.restart_count and report.first_step_at is not None:
        return Reach(Step.TRAINING)
    late = f"running, but no training step reported within {limit:.0f} s"
    if report is not None and report.attempt == job.restart_count and report.immovable:
        return _wait(at, limit, Withdraw(f"{late}, and it cannot be moved: {report.immovable}"))
    return _wait(at, limit, Fail(f"{late}: does the script call pollux.attach()? Its GPUs stay as they are"))


# --- in place ---


def _in_place(at: Situation, job: SlurmJob) -> Action:
    move, companion = at.move, at.companion
    if job.state is not JobState.RUNNING or job.restart_count != move.attempt:
        return Fail(
            f"the job is {job.raw_state} at attempt {job.restart_count}: the allocation to resize is gone"
        )
    report = at.report if at.report is not None and at.report.attempt == job.restart_count else None
    if report is not None and report.refused == move.id and (move.grows or move.step is Step.DRAINING):
        why = report.refused_why or "no reason given"
        alone = why if why.startswith(JOINER_FAILED) else ""
        return Fail(f"the job's agent could not: {why}", undrained=not move.grows, alone=alone)
    if companion is None or companion.state is JobState.PENDING:
        if move.cancelled_by and move.revocable:
            return Withdraw(f"cancelled by {move.cancelled_by}", rest=True)
        if at.paused and move.step in (Step.PLANNED, Step.RECRUITING):
            return Withdraw(PAUSED)
    if move.step is Step.PLANNED:
        return _planned_in_place(at, job)
    if move.grows and (action := _companion(at)) is not None:
        return action
    match move.step:
        case Step.DRAINING:
            limit = at.limits.drain_timeout_s
            late = f"the job's agent did not shrink it within {limit:.0f} s"
            return _wait(at, limit, Fail(late, undrained=True))
        case Step.CHECKPOINTED:
            return _give_back(at, job)
    if report is not None and report.resized == move.id:
        return Reach(Step.TRAINING)
    limit = at.limits.training_timeout_s
    late = f"no training step at the new size was reported within {limit:.0f} s"
    return _wait(at, limit, Fail(late))


def _planned_in_place(at: Situation, job: SlurmJob) -> Action:
    move, limit = at.move, at.limits.planned_timeout_s
    if not same_place(job, move.source):
        return Withdraw(f"the job is on {held(job)} now, not on {move.source}")
    if at.waited > limit:
        # polluxd has asked nothing of the job yet: no cooldown.
        return Withdraw(_not_free(move, limit) if move.grows else "left planned while polluxd was away")
    if not move.grows:
        return Do.DRAIN
    return Do.RECRUIT if at.room.fits_now(move.added, move.job_id) else Do.WAIT


def _give_back(at: Situation, job: SlurmJob) -> Action:
    limit = at.limits.give_back_timeout_s
    if same_place(job, at.move.target):
        return Reach(Step.CONFIGURED)
    if at.waited > limit:
        return Fail(f"Slurm shows the job on {held(job)} {limit:.0f} s after it shrank")
    return Do.GIVE_BACK if at.since_try > REPEAT_S else Do.WAIT


def _companion(at: Situation) -> Action | None:
    """Return the next action for the companion; None once it has started where it is to be."""
    move, companion, limits = at.move, at.companion, at.limits
    recruiting = move.step is Step.RECRUITING
    late = at.waited > (limits.recruit_timeout_s if recruiting else limits.start_timeout_s)
    if companion is None:
        if not recruiting:
            return Fail("its companion job is gone")
        within = f"within {limits.recruit_timeout_s:.0f} s"
        return Fail(f"no companion job was submitted {within}") if late else Do.WAIT
    name = f"job {companion.job_id}"
    if companion.state is JobState.PENDING:
        if companion.held_by_user:
            return Fail(f"its companion, {name}, was held (scontrol hold)")
        if recruiting and at.room.kept(move.added):
            return Do.PLACE
        if move.step is Step.STARTED:
            return Fail(f"its companion, {name}, went back to the queue")
        if (
            not recruiting
            and at.waited > REFUSED_S
            and refused(companion.reason, free=at.room.kept(move.added))
        ):
            why = f"Slurm refuses to start its companion, {name}: {companion.reason}"
            return Fail(why, refused=companion.reason)
        if not late:
            return Do.WAIT
        if recruiting:
            return Fail(f"the GPUs of {move.added} were taken by another job")
        within = f"within {limits.start_timeout_s:.0f} s; Slurm says {companion.reason!r}"
        return Fail(f"{name} was not started {within}")
    if companion.state is not JobState.RUNNING:
        return Fail(f"its companion, {name}, is {companion.raw_state}")
    if not same_place(companion, move.added):
        return Fail(f"its companion, {name}, runs on {held(companion)} instead of {move.added}")
    if recruiting:
        return Reach(Step.CONFIGURED, "the answer to its companion's start had been lost")
    return Reach(Step.STARTED) if move.step is Step.CONFIGURED else None
