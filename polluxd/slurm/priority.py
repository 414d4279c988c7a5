"""Weights of jobs by Slurm's priority: fair share, age, QOS. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from polluxd.slurm.protocol import SlurmJob

MOST = 10.0
"""Largest factor, and inverse of the smallest: no priority starves the other jobs."""


def priority_weights(jobs: Sequence[SlurmJob], power: float) -> Mapping[int, float]:
    """Return a factor on each job's weight, by job id.

    It is (priority / median priority) ** `power`, within 1 / MOST and MOST. Jobs whose priority is not known (0) are
    left out. The median is over users, of each user's highest priority: a user can lower the priorities of his own
    jobs, and many of these would shift a median over jobs until all others are at MOST.
    """
    known = {job.job_id: job.priority for job in jobs if job.priority > 0}
    if power <= 0 or not known:
        return {}
    highest: dict[int, int] = {}
    for job in jobs:
        if job.priority > 0:
            highest[job.uid] = max(job.priority, highest.get(job.uid, 0))
    usual = median(highest.values())
    return {
        job_id: min(max((priority / usual) ** power, 1.0 / MOST), MOST) for job_id, priority in known.items()
    }
