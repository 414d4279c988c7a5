"""Calls to Slurm for jobs that wait: leases that keep them back, and the sizes at which Slurm would start them.

A job whose lease is not renewed starts by itself as a plain Slurm job. polluxd lets that happen on purpose for jobs
that are to contend with plain jobs (`plain_jobs`), and while it is away it happens to all. Each move writes another
size and other nodes into its job, so a job that waits again gets back what its user wrote: else it would wait for the
nodes of its last move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence

from polluxd.apply.placed import geometry
from polluxd.apply.plain_jobs import Contender
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Move, Placement, Step
from polluxd.slurm.protocol import SlurmClient, SlurmJob

log = logging.getLogger(__name__)

_NEVER = float("-inf")
_RENEWED_AT_ONCE = 250
"""scontrol updates one job after the other: more jobs might not finish within the call's time limit."""
_RENEWALS_PER_S = 15.0
"""Each takes about 1 ms of slurmctld's time (`make bench-slurmctld`): 1.5 % of a core."""
_CONTENDERS = 50
"""Most jobs that one step releases into Slurm's queue: each takes a call of some 12 ms, and the next step goes on."""
_SIZES = 20
"""Most jobs of one step that get their users' sizes back, for the same reason."""


class WaitingJobs:
    """The leases and sizes that this process has written, and when.

    Args:
        lease: for how long a waiting job is kept back at a time [s].
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
        self._sized: dict[int, int] = {}
        """By job: the restart count at which its size is its user's."""
        self.contending: frozenset[int] = frozenset()
        """The jobs that stand in Slurm's queue: their leases are not renewed."""

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

    def keep_back(self, job_id: int, *, release: bool) -> None:
        """Keep a job back for a whole lease from now.

        Slurm takes the priority of a job that fits on no node at its size, or that could not be launched. It gets that
        back (`release`); the lease keeps Slurm from trying the same again.
        """
        until = self._clock() + self._lease
        calls: list[Callable[[], None]] = [lambda: self._slurm.renew([job_id], until)]
        if release:
            calls.append(lambda: self._slurm.release(job_id))
        for call in calls:
            try:
                call()
            except SlurmRefused as error:
                log.warning("job %d: it could not be kept back as before: %s", job_id, error)

    def contend(self, chosen: Collection[Contender], now: float, kept_off: Container[int] = ()) -> None:
        """End the leases of the jobs that are to contend from now on; the next renewal keeps all others back.

        Jobs that must not start again on their former nodes yet (`kept_off`) keep their leases.
        """
        chosen = [contender for contender in chosen if contender.job.job_id not in kept_off]
        self.contending = frozenset(contender.job.job_id for contender in chosen)
        kept_back = [(job, size) for job, size, _ in chosen if (job.eligible_time or 0.0) > now]
        for job, size in kept_back[:_CONTENDERS]:
            self._authorize()
            try:
                self._slurm.configure(job.job_id, geometry(job, size, anywhere=True), start=True)
            except SlurmRefused as error:
                log.info("job %d: Slurm does not take it into its queue: %s", job.job_id, error)
                continue
            log.info("job %d: stands in Slurm's queue, before plain jobs that come after it", job.job_id)

    def leave(self, jobs: Iterable[SlurmJob]) -> None:
        """End the leases of jobs into which polluxd may not even write the size that their users asked for.

        Slurm starts them as they were submitted, without any update.
        """
        jobs, now = list(jobs), self._clock()
        self.contending |= {job.job_id for job in jobs}
        for job in [job for job in jobs if (job.eligible_time or 0.0) > now][:_CONTENDERS]:
            self._authorize()
            try:
                self._slurm.renew([job.job_id], now)
            except SlurmRefused as error:
                log.info("job %d: its lease cannot be ended, and ends by itself: %s", job.job_id, error)
                continue
            log.info("job %d: left to Slurm, which lets polluxd not update it", job.job_id)

    def resized(self, job_id: int) -> None:
        """Take in that polluxd writes another size into the job."""
        self._sized[job_id] = -1

    def restore_sizes(self, jobs: Mapping[int, SlurmJob], still: Collection[int]) -> None:
        """Write the users' sizes into the jobs that wait.

        Args:
            jobs: all of them, by id.
            still: jobs that no move brings anywhere.
        """
        self._sized = {job_id: attempt for job_id, attempt in self._sized.items() if job_id in jobs}
        waiting = [jobs[job_id] for job_id in jobs if job_id in still]
        # A job that never started has the size of its submission, unless this process has changed that.
        due = [
            job
            for job in waiting
            if job.state is JobState.PENDING
            and not job.tasks
            and self._sized.get(job.job_id, 0) != job.restart_count
        ]
        for job in due[:_SIZES]:
            self._sized[job.job_id] = job.restart_count
            if job.demands.asked is None:
                continue
            nodes, gpus = job.demands.asked
            size = Placement(tuple(map(str, range(nodes))), gpus)
            kind = min(job.demands.gpu_types, default="")
            self._authorize()
            try:
                self._slurm.configure(job.job_id, geometry(job, size, kind, anywhere=True), start=False)
            except SlurmRefused as error:
                log.warning("job %d keeps the size of its last move in Slurm: %s", job.job_id, error)


def kept_back(
    jobs: Mapping[int, SlurmJob],
    pending_companions: Mapping[int, SlurmJob],
    moves: Sequence[Move],
    contending: Collection[int] = (),
) -> list[SlurmJob]:
    """Return the jobs and pending companions that polluxd has not released to start: it renews their leases.

    Args:
        jobs: by job id.
        pending_companions: by the id of the move that they serve.
        contending: jobs that Slurm may start by itself.
    """
    released = [m for m in moves if m.step in (Step.CONFIGURED, Step.STARTED)]
    starting, coming = {m.job_id for m in released}, {m.id for m in released}
    waiting = [job for job_id, job in jobs.items() if job_id not in starting and job_id not in contending]
    return waiting + [job for number, job in pending_companions.items() if number not in coming]
