"""Leases keep waiting jobs back.

A job whose lease is not renewed starts by itself as a plain Slurm job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Move, Step
from polluxd.slurm.protocol import SlurmClient, SlurmJob

log = logging.getLogger(__name__)

_NEVER = float("-inf")
_RENEWED_AT_ONCE = 250
"""scontrol updates one job after the other: more jobs might not finish within the call's time limit."""
_RENEWALS_PER_S = 15.0
"""Each takes about 1 ms of slurmctld's time (`make bench-slurmctld`): 1.5 % of a core."""


class Leases:
    """The leases that this process has renewed, and when.

    Args:
        lease: for how long a waiting job is kept back at a time [s].
        authorize: called before each call to Slurm.
        clock: POSIX time [s].
        monotonic: seconds that only go forward.
    """

    def __init__(
        self,
        slurm: SlurmClient,
        *,
        lease: float,
        authorize: Callable[[], int],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._slurm = slurm
        self._lease = lease
        self._authorize = authorize
        self._clock = clock
        self._monotonic = monotonic
        self._renewed: dict[int, float] = {}

    def renew(self, jobs: Iterable[SlurmJob]) -> None:
        """Renew the leases of these jobs where they wait and are not held.

        One call to Slurm renews many jobs. A third of the lease may pass between renewals. The more jobs wait, the
        longer are their leases, so that slurmctld has time for others; one call at a time is made while no lease is
        about to end, so that moves need not wait for renewals.
        """
        now, ticks = self._clock(), self._monotonic()
        waiting = [job for job in jobs if job.state is JobState.PENDING and not job.held_by_user]
        between = max(self._lease / 3, len(waiting) / _RENEWALS_PER_S)
        self._renewed = {j.job_id: self._renewed[j.job_id] for j in waiting if j.job_id in self._renewed}
        # A job's own --begin, when later than the lease, stays.
        due = [
            job
            for job in waiting
            if ticks - self._renewed.get(job.job_id, _NEVER) > between and (job.begin_time or 0.0) <= now
        ]
        due.sort(key=lambda job: job.eligible_time or 0.0)
        urgent = sum((job.eligible_time or 0.0) < now + self._lease / 3 for job in due)
        for first in range(0, max(urgent, min(len(due), _RENEWED_AT_ONCE)), _RENEWED_AT_ONCE):
            some = [job.job_id for job in due[first : first + _RENEWED_AT_ONCE]]
            self._authorize()
            try:
                self._slurm.renew(some, now + max(self._lease, 3 * between))
            except SlurmRefused as error:
                # polluxd tries again in a third of the lease. A job whose lease stays refused starts as a plain
                # job; the moves of other jobs must not wait for it.
                log.warning("leases could not be renewed: %s", error)
            self._renewed.update(dict.fromkeys(some, ticks))

    def extend(self, job_id: int) -> None:
        """Keep a job back for a whole lease from now."""
        try:
            self._slurm.renew([job_id], self._clock() + self._lease)
        except SlurmRefused as error:
            log.warning("job %d: its lease could not be renewed: %s", job_id, error)

    def release(self, job_id: int) -> None:
        """Restore the priority of a job that fits on no node at its size.

        Its lease keeps it back, so that Slurm does not try the same size again.
        """
        try:
            self._slurm.release(job_id)
        except SlurmRefused as error:
            log.warning("job %d: Slurm does not give its priority back: %s", job_id, error)


def kept_back(
    jobs: Mapping[int, SlurmJob],
    pending_companions: Mapping[int, SlurmJob],
    moves: Sequence[Move],
    contending: Collection[int] = (),
) -> list[SlurmJob]:
    """Return the jobs whose leases polluxd renews.

    They are the jobs and pending companions that polluxd has not released to start.

    Args:
        jobs: by job id.
        pending_companions: by the id of the move that they serve.
        contending: jobs that Slurm may start by itself.
    """
    released = [m for m in moves if m.step in (Step.CONFIGURED, Step.STARTED)]
    starting, coming = {m.job_id for m in released}, {m.id for m in released}
    waiting = [job for job_id, job in jobs.items() if job_id not in starting and job_id not in contending]
    return waiting + [job for number, job in pending_companions.items() if number not in coming]
