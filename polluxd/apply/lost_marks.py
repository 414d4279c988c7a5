"""Notice jobs whose AdminComment has lost Pollux' mark while they live.

An administrator or a tool of the site has overwritten it. The job looks like a plain one from then on, so polluxd
leaves it alone; it has not ended.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polluxd.slurm.protocol import SlurmJob

log = logging.getLogger(__name__)


class LostMarks:
    """The comments of the jobs that had a mark.

    A restart of polluxd loses them: the job then counts as a plain one.
    """

    def __init__(self) -> None:
        self._known: Mapping[tuple[int, int], SlurmJob] = {}
        self.lost: Sequence[SlurmJob] = ()
        """Jobs without their mark, as Slurm shows them, with what the mark said."""

    def observe(self, jobs: Sequence[SlurmJob]) -> None:
        """Take in all jobs that Slurm shows; log each mark that is gone, once."""
        former, logged = self._known, {job.job_id for job in self.lost}
        known, lost = {}, []
        for job in jobs:
            key = job.job_id, job.uid
            before = former.get(key)
            if job.spec is not None:
                known[key] = job
            elif before is not None and not job.state.finished:
                known[key] = before
                lost.append(
                    replace(
                        job,
                        spec=before.spec,
                        demands=before.demands,
                        companion=before.companion,
                        submit_time=before.submit_time,
                        begin_time=before.begin_time,
                    )
                )
                if job.job_id not in logged:
                    log.error(
                        "job %d is Pollux' and its AdminComment has lost the mark: polluxd leaves it alone. As root: "
                        "scontrol update JobId=%d AdminComment='%s'",
                        job.job_id,
                        job.job_id,
                        before.admin_comment,
                    )
        self._known, self.lost = known, tuple(lost)

    def note(self) -> str:
        """Return the text for `polluxctl status`; empty where no mark is lost."""
        if not self.lost:
            return ""
        named = ", ".join(str(job.job_id) for job in self.lost[:5])
        return f"left alone, since their AdminComment has lost Pollux' mark: jobs {named}"
