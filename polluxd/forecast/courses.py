"""Several courses from one snapshot, each with its own draws. Pure, except that the caller may end them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from polluxd.forecast.ahead import Course, look_ahead
from polluxd.forecast.history import History
from polluxd.model import Snapshot, SnapshotJob

DRAWS = 12
LEAST_DRAWS = 5
"""Fewer courses say nothing of an interval."""
HORIZON_S = 48 * 3600.0
ARRIVALS_S = 8 * 3600.0
"""Jobs are drawn that come within this time: what comes later meets few of those that are forecast."""
MOST_JOBS = 400
"""Of more, not even `LEAST_DRAWS` courses fit into the share of CPU."""


@dataclass(frozen=True, slots=True)
class Courses:
    """What the courses saw, by job."""

    found: Mapping[int, tuple[Course, ...]]
    by: Mapping[int, str]
    """What each job's length goes by."""
    draws: int


def within_bound(snapshot: Snapshot) -> Snapshot:
    """Of more than `MOST_JOBS`, leave out waiting ones: the last of the users who have the most."""
    number, jobs = Counter[str](), list[tuple[int, SnapshotJob]]()
    for job in sorted(snapshot.jobs, key=lambda job: (not job.placement, job.submitted_at, job.job_id)):
        jobs.append((-1 if job.placement else number[job.user], job))
        number[job.user] += 1
    kept = {job.job_id for _, job in sorted(jobs, key=itemgetter(0))[:MOST_JOBS]}
    return replace(snapshot, jobs=tuple(job for job in snapshot.jobs if job.placement or job.job_id in kept))


def run_ahead(
    snapshot: Snapshot,
    history: History,
    held_s: Mapping[int, float],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    horizon_s: float = HORIZON_S,
    drains: Mapping[str, float] | None = None,
    enough: Callable[[], bool] = bool,
) -> Courses:
    """Run courses. The same seed draws the same unknowns, whatever is changed in the snapshot.

    Args:
        held_s: by job: seconds for which it has held its GPUs.
        enough: asked before each course; true ends them.
    """
    courses: list[dict[int, Course]] = []
    by: dict[int, str] = {}
    first_id = max((job.job_id for job in snapshot.jobs), default=0) + 1
    for draw in range(draws):
        if enough():
            break
        work = {}
        for job in snapshot.jobs:
            random = np.random.default_rng([seed, draw, job.job_id])
            work[job.job_id], by[job.job_id] = history.work(job, held_s.get(job.job_id, 0.0), random)
        arrivals = history.arrivals(
            snapshot.taken_at, ARRIVALS_S, first_id, np.random.default_rng([seed, draw])
        )
        courses.append(look_ahead(snapshot, work, arrivals, horizon_s=horizon_s, drains=drains))
    return Courses(
        {job.job_id: tuple(course[job.job_id] for course in courses) for job in snapshot.jobs},
        by,
        len(courses),
    )
