"""GPUs of each job over time, from polluxd's record of its moves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from polluxd.model import Move, Step
from polluxd.store import JobView


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a job held the same GPUs."""

    begin: float
    """POSIX time."""
    end: float
    gpus: int


def stretches(job: JobView, moves: Iterable[Move], since: float, until: float) -> list[Stretch]:
    """Return the stretches of a job between two POSIX times, in order.

    A stretch without GPUs is a wait. A job that polluxd never started (it started as a plain Slurm job) has held its
    present GPUs since its start.

    Args:
        moves: the moves of the job.
    """
    changes = [(job.submitted_at, 0), *_changes(moves)]
    if job.ended_at is not None:
        changes.append((job.ended_at, 0))
    if job.started_at is not None and not any(gpus for _, gpus in changes):
        changes.append((job.started_at, job.gpus))
    changes.sort(key=lambda change: change[0])
    last = min(until, job.ended_at if job.ended_at is not None else until)
    found: list[Stretch] = []
    for number, (at, gpus) in enumerate(changes):
        end = changes[number + 1][0] if number + 1 < len(changes) else last
        begin, end = max(at, since), min(end, last)
        if begin >= end:
            continue
        if found and found[-1].gpus == gpus and found[-1].end == begin:
            begin = found.pop().begin
        found.append(Stretch(begin, end, gpus))
    return found


def _changes(moves: Iterable[Move]) -> list[tuple[float, int]]:
    changes = []
    for move in moves:
        if Step.REQUEUED in move.times:
            changes.append((move.times[Step.REQUEUED], 0))
        # As Slurm counts: a companion's GPUs from its start, those of a shrinking job until they are given back.
        shrinks = move.in_allocation and not move.grows
        reached = move.times.get(Step.CONFIGURED if shrinks else Step.STARTED, move.times.get(Step.TRAINING))
        if reached is not None:
            changes.append((reached, move.target.gpus))
            if move.grows and Step.FAILED in move.times:
                changes.append((move.times[Step.FAILED], move.source.gpus))
    return changes
