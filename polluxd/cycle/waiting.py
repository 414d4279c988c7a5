"""When a job began to wait, where its user kept it back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polluxd.model import JobState
from polluxd.slurm.protocol import SlurmJob
from polluxd.store import JobTimes


def kept_back(job: SlurmJob, now: float) -> bool:
    """Tell whether a waiting job is not to start yet: its user says so."""
    later = (job.begin_time or 0.0) > now
    return job.state is JobState.PENDING and (job.held_by_user or job.dependent or later)


class WaitingTimes:
    """Count no time as waiting in which a user kept a job back.

    Without this, a user would submit jobs on hold and release them once they have waited past the starvation bound:
    they would go before all others. A new leader of polluxd knows only of jobs that are still kept back.
    """

    def __init__(self) -> None:
        self._kept_back_at: dict[int, float] = {}
        """By job: when it was last seen to be kept back [POSIX s]."""

    def corrected(
        self, jobs: Sequence[SlurmJob], times: Mapping[int, JobTimes], now: float
    ) -> dict[int, JobTimes]:
        """Return the times of all jobs; `held_at` no earlier than a hold ends."""
        known = self._kept_back_at
        self._kept_back_at = {
            job.job_id: now if kept_back(job, now) else known[job.job_id]
            for job in jobs
            if job.spec is not None and (kept_back(job, now) or job.job_id in known)
        }
        found = dict(times)
        for job in jobs:
            since = self._kept_back_at.get(job.job_id)
            if since is not None:
                mine = times.get(job.job_id, JobTimes(job.submit_time))
                found[job.job_id] = replace(mine, held_at=max(since, mine.held_at or 0.0))
        return found
