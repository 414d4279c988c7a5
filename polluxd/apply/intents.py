"""List the moves that lead from the present placements to a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from polluxd.model import Placement, Plan, SnapshotJob

PathChoice = Callable[[SnapshotJob, Placement], tuple[str, Placement]]
"""The path of a job to a target, and the target as the path wants it (`paths.choose`)."""


@dataclass(frozen=True, slots=True)
class Intent:
    """A move that a plan asks for; it becomes a `Move` once written to the database."""

    job_id: int
    attempt: int
    path: str
    source: Placement
    target: Placement
    reason: str
    user: str = ""


def through_the_queue(job: SnapshotJob, target: Placement) -> tuple[str, Placement]:
    """The path that every job can take."""
    return "start" if not job.placement else "requeue" if target else "park", target


def intents(
    plan: Plan, jobs: Mapping[int, SnapshotJob], choose_path: PathChoice = through_the_queue
) -> list[Intent]:
    """The moves of `plan`, those that give GPUs back first.

    Pinned jobs never move; an allocation equal to what the job holds is no move. Order: parks and shrinks, then
    moves at the same size, grows and first starts, each by job id, so that a replay sees the same order.
    """
    found = []
    for allocation in plan.allocations:
        job = jobs.get(allocation.job_id)
        if job is None or job.pinned or allocation.placement == job.placement:
            continue
        path, target = choose_path(job, allocation.placement)
        found.append(
            Intent(job.job_id, job.attempt, path, job.placement, target, allocation.reason, job.user)
        )
    return sorted(found, key=lambda i: (i.target.gpus - i.source.gpus, i.job_id))
