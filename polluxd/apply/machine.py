"""Decide what to do next about one move.

The decision is a pure function of the move, Slurm's present state, the agent's report, and the time.

The fence is (job id, restart count): a move acts only on the attempt that it was planned for. Every action is safe to
repeat, so that a daemon killed between any two lines finishes the move on its next start.
"""

from __future__ import annotations

from math import floor

from polluxd.apply import resizing
from polluxd.apply.actions import (
    ACKNOWLEDGED_S,
    PAUSED,
    REFUSED_S,
    REPEAT_S,
    Action,
    Configure,
    Drain,
    Fail,
    Reach,
    Requeue,
    RunAgain,
    Wait,
    Withdraw,
)
from polluxd.apply.capacity import Capacity
from polluxd.apply.placed import held, same_place
from polluxd.apply.refusal_reasons import refused
from polluxd.config.settings import MoveSettings
from polluxd.model import JobState, Move, Report, Step
from polluxd.slurm.protocol import SlurmJob


def failed_to_start(move: Move, job: SlurmJob) -> bool:
    """Tell whether Slurm ended the job in the second of its new start.

    Slurm does so if the job's credential was revoked. The job's record then says NonZeroExitCode. The record of a
    script that failed at once looks the same (Slurm 22.05), so polluxd runs such a script once more. The restart count
    keeps polluxd from repeating this.
    """
    return (
        job.raw_state == "FAILED"
        and move.path == "requeue"
        and move.step in (Step.REQUEUED, Step.CONFIGURED)
        and job.restart_count == move.attempt + 1
        and job.start_time is not None
        and job.start_time == job.end_time
    )


def next_action(
    move: Move,
    job: SlurmJob | None,
    report: Report | None,
    room: Capacity,
    *,
    now: float,
    waited: float,
    since_try: float = float("inf"),
    limits: MoveSettings,
    paused: bool = False,
    companion: SlurmJob | None = None,
    forbidden: str = "",
    insist: bool = False,
) -> Action:
    """Return the next action of `move`.

    Args:
        now: POSIX time [s].
        waited: how long the move has been at its step [s], by a clock that does not step.
        since_try: how long ago polluxd sent the last requeue or shrink [s], by a clock that does not step.
        companion: the job that was submitted for the move, where the move grows a job in place.
        insist: requeue the job even if its agent does not drain it (`undrained`).
        forbidden: the rule by which Slurm would not start the job at the move's target (`startable.forbids`).
    """
    if job is None:
        return Fail("the job is no longer known to Slurm")
    if (end := _ended(move, job) or _taken_back(move, job, forbidden)) is not None:
        return end
    if move.in_allocation:
        return resizing.next_action(
            move,
            job,
            report,
            companion,
            room,
            waited=waited,
            since_try=since_try,
            limits=limits,
            paused=paused,
        )
    match move.step:
        case Step.PLANNED:
            return _planned(move, job, room, waited, limits, paused=paused)
        case Step.DRAINING:
            return _draining(move, job, report, waited, limits, insist=insist)
        case Step.CHECKPOINTED:
            return _checkpointed(move, job, now, waited, since_try, limits)
        case Step.REQUEUED:
            return _requeued(move, job, room, now, waited, limits)
        case Step.CONFIGURED:
            return _configured(move, job, room, waited, limits)
        case Step.STARTED:
            return _started(job, report, waited, limits)
        case Step.RECRUITING | Step.TRAINING | Step.PARKED | Step.FAILED:
            return Wait()


def _ended(move: Move, job: SlurmJob) -> Action | None:
    """Return the action that ends a move of any kind, at any step."""
    if failed_to_start(move, job):
        return RunAgain()
    if job.state in (
        JobState.COMPLETED,
        JobState.CANCELLED,
    ):  # a short job, or its user: the move did nothing wrong
        return Withdraw(f"the job ended ({job.raw_state}) during the move", rest=False)
    if job.state.finished:
        return Fail(f"the job ended ({job.raw_state}) during the move")
    if job.state is JobState.PENDING and job.held_by_user and move.step is not Step.PLANNED:
        return Fail("the job was held (scontrol hold) during the move")
    if job.state is JobState.PENDING and job.dependent and move.step is not Step.PLANNED:
        return Fail("the job was made to wait for another one (Dependency) during the move", keep_back=True)
    return None


def _taken_back(move: Move, job: SlurmJob, forbidden: str) -> Action | None:
    """Return the action that withdraws a move, if one applies.

    Only a move that can still be taken back is withdrawn. `resizing` itself obeys `cancelled_by`.
    """
    if move.step is not Step.PLANNED and (move.in_allocation or job.state is not JobState.RUNNING):
        return None
    if forbidden and move.revocable:
        return Withdraw(f"{forbidden}; the job could not start there", rest=False)
    if job.state is JobState.RUNNING and move.revocable and not move.in_allocation:
        if job.held_by_user:
            return Withdraw("the job is on hold (scontrol hold): it would not start again", rest=False)
        if job.deadline is not None:
            return Withdraw("the job has a deadline: Slurm could end it before its start", rest=False)
    if move.cancelled_by and move.revocable and not move.in_allocation:
        return Withdraw(f"cancelled by {move.cancelled_by}", rest=True)
    return None


def _planned(
    move: Move, job: SlurmJob, room: Capacity, waited: float, limits: MoveSettings, *, paused: bool
) -> Action:
    if job.restart_count != move.attempt:
        return Fail(f"the job restarted (attempt {job.restart_count}) after the move was planned")
    if paused:
        return Withdraw(PAUSED, rest=False)
    if room.out_of_reach(move.target):
        return Withdraw(_taken(move), rest=False)
    if waited > limits.planned_timeout_s:
        late = f"the GPUs of {move.target} did not come free within {limits.planned_timeout_s:.0f} s"
        # A waiting job has lost nothing and must not wait longer because of it: no cooldown.
        return Fail(late) if move.source else Withdraw(late, rest=False)
    if move.path == "start":
        if same_place(job, move.target):
            return Reach(Step.CONFIGURED, "the answer to its start had been lost")
        if job.state is not JobState.PENDING:
            return Fail(f"the job started on its own ({job.raw_state})")
        if job.held_by_user:
            return Fail("the job was held (scontrol hold)")
        if job.dependent:
            return Withdraw("the job was made to wait for another one (Dependency)", rest=False)
        return Configure() if room.fits_now(move.target, move.job_id) else Wait()
    if job.state is not JobState.RUNNING:
        return Fail(f"the job is {job.raw_state}, no longer running")
    return Drain() if room.fits_soon(move.target, move.source, move.job_id) else Wait()


def _taken(move: Move) -> str:
    return f"GPUs of {move.target} went to a job outside Pollux, or the node has fewer now"


def _draining(
    move: Move,
    job: SlurmJob,
    report: Report | None,
    waited: float,
    limits: MoveSettings,
    *,
    insist: bool,
) -> Action:
    if job.state is JobState.PENDING:
        return Reach(Step.REQUEUED, "requeued by a user or administrator while draining")
    if job.restart_count != move.attempt:
        return Fail("the job restarted while draining")
    if report is not None and report.attempt == job.restart_count and report.refused == move.id:
        why = f"the job's agent could not drain: {report.refused_why or 'no reason given'}"
        # A return to its older checkpoint would lose the training since then.
        return _insisted(why) if insist else Fail(f"{why}; left running", undrained=True)
    if waited > limits.drain_timeout_s + ACKNOWLEDGED_S:
        return Fail("left draining while polluxd was away or not acting: the plan is out of date")
    if waited > limits.drain_timeout_s:
        if report is not None and report.checkpointed:
            return Reach(
                Step.CHECKPOINTED,
                f"no acknowledgement in {limits.drain_timeout_s:.0f} s: the previous checkpoint stands",
            )
        why = f"no acknowledgement in {limits.drain_timeout_s:.0f} s and no checkpoint to go back to"
        return _insisted(why) if insist else Fail(f"{why}: left running", undrained=True)
    return Wait()


def _insisted(why: str) -> Action:
    return Reach(
        Step.CHECKPOINTED,
        f"{why}, not for the first time, and its user holds more than an equal share: requeued all the same",
    )


def _checkpointed(
    move: Move, job: SlurmJob, now: float, waited: float, since_try: float, limits: MoveSettings
) -> Action:
    if job.state is JobState.PENDING:
        return Reach(Step.REQUEUED)
    if job.state is JobState.COMPLETING:
        return _completing(waited, limits)
    if job.restart_count != move.attempt:
        return Fail("the job restarted before it was requeued")
    if waited > ACKNOWLEDGED_S:
        return Fail("the checkpoint was acknowledged too long ago: the job has gone on training")
    continues = job.spec is not None and job.spec.continues
    if move.ends_at is not None and now >= move.ends_at and not continues:
        # Slurm ends it within a minute. A new attempt would have a whole minute once more.
        return Fail("its time limit is used up: left to Slurm, which ends it")
    return Requeue() if since_try > REPEAT_S else Wait()


def _completing(waited: float, limits: MoveSettings) -> Action:
    """Slurm waits for processes that cannot be killed for as long as it takes."""
    if waited > limits.requeued_timeout_s:
        return Fail(f"its processes did not end within {limits.requeued_timeout_s:.0f} s of the requeue")
    return Wait()


def _requeued(
    move: Move, job: SlurmJob, room: Capacity, now: float, waited: float, limits: MoveSettings
) -> Action:
    if job.state is JobState.RUNNING:
        if same_place(job, move.target):
            return Reach(Step.CONFIGURED)
        return Fail(f"the job started on {held(job)} instead of {move.target}")
    if job.state is JobState.SUSPENDED:
        return Fail(f"the job started on its own, on {held(job)}, and was suspended there")
    if job.state is not JobState.PENDING:
        return _completing(waited, limits)
    if move.path == "park":
        return Reach(Step.PARKED)
    if room.out_of_reach(move.target):
        return Fail(_taken(move), keep_back=True, rest=False)
    if waited > limits.requeued_timeout_s:
        return Fail(
            f"the GPUs of {move.target} did not come free within {limits.requeued_timeout_s:.0f} s",
            keep_back=True,
        )
    # A start in the second of the requeue, on the same node, fails with "Job credential revoked" (1 in 8). If the
    # clock was set back since, that second may be far off, or come again: a whole one has to pass then.
    requeued_at = move.times.get(Step.REQUEUED, now)
    if floor(now) == floor(requeued_at) or (now < requeued_at and waited <= 1.0):
        return Wait()
    return Configure() if room.fits_now(move.target, move.job_id) else Wait()


def _configured(move: Move, job: SlurmJob, room: Capacity, waited: float, limits: MoveSettings) -> Action:
    if job.state in (JobState.RUNNING, JobState.COMPLETING):
        if same_place(job, move.target):
            return Reach(Step.STARTED)
        return Fail(f"Slurm started the job on {held(job)} instead of {move.target}")
    if room.out_of_reach(move.target):
        return Fail(
            _taken(move), keep_back=True, rest=False
        )  # it is bound to these nodes, and others may be free
    if waited > REFUSED_S and refused(job.reason):
        return Fail(f"Slurm refuses to start it there: {job.reason}", keep_back=True)
    if waited > limits.start_timeout_s:
        return Fail(
            f"not started within {limits.start_timeout_s:.0f} s; Slurm says {job.reason!r}", keep_back=True
        )
    return Wait()


def _started(job: SlurmJob, report: Report | None, waited: float, limits: MoveSettings) -> Action:
    if job.state is JobState.PENDING:
        return Fail("the job went back to the queue before its first step")
    if report is not None and report.attempt == job.restart_count and report.first_step_at is not None:
        return Reach(Step.TRAINING)
    if waited > limits.training_timeout_s:
        return Fail(
            f"running, but no training step reported within {limits.training_timeout_s:.0f} s: does the script call "
            "pollux.attach()? Its GPUs stay as they are"
        )
    return Wait()
