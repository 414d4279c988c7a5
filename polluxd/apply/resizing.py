"""Decide what to do next about a move within an allocation.

The job is resized in place. All functions here are pure.

    shrink:  planned -> draining -> checkpointed -> configured -> training
             The agent makes the ranks on the nodes to give back leave, and acknowledges; then Slurm takes the nodes.
    grow:    planned -> recruiting -> configured -> started -> training
             The agent submits a companion job; polluxd places it on the new nodes; its ranks join.

Until the agent has acknowledged (shrink) or has reported the joining ranks' first step (grow), the job trains on its
old nodes, and a move that fails costs the job nothing. Any event that no case here handles (a node fails, somebody
requeues the job) ends the move; `companions.gather` and `left_over` then find leftover companions and nodes.
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.apply.actions import (
    PAUSED,
    REPEAT_S,
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
from polluxd.apply.capacity import Capacity
from polluxd.apply.placed import held, same_place
from polluxd.config.settings import MoveSettings
from polluxd.model import JobState, Move, Report, Step
from polluxd.slurm.protocol import SlurmJob


def next_action(
    move: Move,
    job: SlurmJob,
    report: Report | None,
    companion: SlurmJob | None,
    room: Capacity,
    *,
    waited: float,
    since_try: float,
    limits: MoveSettings,
    paused: bool,
) -> Action:
    """Return the next action of a move whose job has not ended.

    The arguments are those of `machine.next_action`.
    """
    if job.state is not JobState.RUNNING or job.restart_count != move.attempt:
        return Fail(
            f"the job is {job.raw_state} at attempt {job.restart_count}: the allocation to resize is gone"
        )
    current = report if report is not None and report.attempt == job.restart_count else None
    if current is not None and current.refused == move.id and (move.grows or move.step is Step.DRAINING):
        return Fail(
            f"the job's agent could not: {current.refused_why or 'no reason given'}", undrained=not move.grows
        )
    waiting = companion is None or companion.state is JobState.PENDING
    if move.cancelled_by and move.revocable and waiting:
        return Withdraw(f"cancelled by {move.cancelled_by}", rest=True)
    if paused and waiting and move.step in (Step.PLANNED, Step.RECRUITING):
        return Withdraw(PAUSED, rest=False)
    if move.step is Step.PLANNED:
        return _planned(move, job, room, waited, limits)
    if move.grows:
        return _grow(move, current, companion, room, waited, limits)
    return _shrink(move, job, current, waited, since_try, limits)


def left_over(job: SlurmJob, report: Report | None, moves: Mapping[int, Move]) -> Move | None:
    """Return the shrink that the job carried out although its move failed.

    Slurm still shows nodes that the job no longer uses.
    """
    if job.state is not JobState.RUNNING or report is None or report.attempt != job.restart_count:
        return None
    move = moves.get(report.resized)
    if move is None or move.job_id != job.job_id or move.attempt != job.restart_count or move.grows:
        return None
    unused = set(job.gpus_per_node_held) - set(move.target.nodes)
    return move if move.step is Step.FAILED and unused else None


def _planned(move: Move, job: SlurmJob, room: Capacity, waited: float, limits: MoveSettings) -> Action:
    if not same_place(job, move.source):
        return Withdraw(f"the job is on {held(job)} now, not on {move.source}", rest=False)
    if waited > limits.planned_timeout_s:
        # polluxd has asked nothing of the job yet: no cooldown.
        late = f"the GPUs of {move.added} did not come free within {limits.planned_timeout_s:.0f} s"
        return Withdraw(late if move.grows else "left planned while polluxd was away", rest=False)
    if not move.grows:
        return Drain()
    return Recruit() if room.fits_now(move.added, move.job_id) else Wait()


def _shrink(
    move: Move,
    job: SlurmJob,
    current: Report | None,
    waited: float,
    since_try: float,
    limits: MoveSettings,
) -> Action:
    match move.step:
        case Step.DRAINING:
            if waited > limits.drain_timeout_s:
                return Fail(
                    f"the job's agent did not shrink it within {limits.drain_timeout_s:.0f} s", undrained=True
                )
            return Wait()
        case Step.CHECKPOINTED:
            if same_place(job, move.target):
                return Reach(Step.CONFIGURED)
            if waited > limits.give_back_timeout_s:
                return Fail(
                    f"Slurm shows the job on {held(job)} {limits.give_back_timeout_s:.0f} s after it shrank"
                )
            return GiveBack() if since_try > REPEAT_S else Wait()
        case _:
            return _confirm(move, current, waited, limits)


def _grow(
    move: Move,
    current: Report | None,
    companion: SlurmJob | None,
    room: Capacity,
    waited: float,
    limits: MoveSettings,
) -> Action:
    if companion is None:
        if move.step is not Step.RECRUITING:
            return Fail("its companion job is gone")
        if waited > limits.recruit_timeout_s:
            return Fail(f"no companion job was submitted within {limits.recruit_timeout_s:.0f} s")
        return Wait()
    if companion.state is JobState.PENDING and companion.held_by_user:
        return Fail(f"its companion, job {companion.job_id}, was held (scontrol hold)")
    if companion.state is JobState.PENDING:
        return _place(move, companion, room, waited, limits)
    if companion.state is not JobState.RUNNING:
        return Fail(f"its companion, job {companion.job_id}, is {companion.raw_state}")
    if not same_place(companion, move.added):
        return Fail(
            f"its companion, job {companion.job_id}, runs on {held(companion)} instead of {move.added}"
        )
    match move.step:
        case Step.RECRUITING:
            return Reach(Step.CONFIGURED, "the answer to its companion's start had been lost")
        case Step.CONFIGURED:
            return Reach(Step.STARTED)
        case _:
            return _confirm(move, current, waited, limits)


def _place(move: Move, companion: SlurmJob, room: Capacity, waited: float, limits: MoveSettings) -> Action:
    match move.step:
        case Step.RECRUITING:
            if room.kept(move.added):
                return Place()
            if waited > limits.recruit_timeout_s:
                return Fail(f"the GPUs of {move.added} were taken by another job")
            return Wait()
        case Step.CONFIGURED if waited <= limits.start_timeout_s:
            return Wait()
        case Step.CONFIGURED:
            why = companion.reason
            return Fail(
                f"job {companion.job_id} was not started within {limits.start_timeout_s:.0f} s; Slurm says {why!r}"
            )
        case _:
            return Fail(f"its companion, job {companion.job_id}, went back to the queue")


def _confirm(move: Move, current: Report | None, waited: float, limits: MoveSettings) -> Action:
    if current is not None and current.resized == move.id:
        return Reach(Step.TRAINING)
    if waited > limits.training_timeout_s:
        return Fail(f"no training step at the new size was reported within {limits.training_timeout_s:.0f} s")
    return Wait()
