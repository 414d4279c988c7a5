"""Give waiting jobs back the size that their users wrote.

Each move writes another size and other nodes into the job. If polluxd is gone when the job's lease ends, Slurm starts
the job as it stands in Slurm's record: without this it would wait for the nodes of its last move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

from polluxd.apply.placed import geometry
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Placement
from polluxd.slurm.protocol import SlurmClient, SlurmJob

log = logging.getLogger(__name__)

CALLS = 20
"""Most jobs of one step: each takes a call of some 12 ms."""


class SubmittedSizes:
    """The waiting jobs whose size in Slurm is their user's.

    Args:
        authorize: called before each call to Slurm.
    """

    def __init__(self, slurm: SlurmClient, authorize: Callable[[], int]) -> None:
        self._slurm = slurm
        self._authorize = authorize
        self._own: dict[int, int] = {}
        """By job: the restart count at which its size is its user's."""

    def changed(self, job_id: int) -> None:
        """Take in that polluxd writes another size into the job."""
        self._own[job_id] = -1

    def restore(self, jobs: Mapping[int, SlurmJob], still: Collection[int]) -> None:
        """Write the users' sizes into the jobs that wait.

        Args:
            jobs: all of them, by id.
            still: jobs that no move brings anywhere.
        """
        self._own = {job_id: attempt for job_id, attempt in self._own.items() if job_id in jobs}
        waiting = [
            job
            for job_id, job in jobs.items()
            if job_id in still and job.state is JobState.PENDING and not job.tasks
        ]
        # A job that never started has the size of its submission, unless this process has changed that.
        due = [job for job in waiting if self._own.get(job.job_id, 0) != job.restart_count]
        for job in due[:CALLS]:
            self._own[job.job_id] = job.restart_count
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
