"""Limit how far a job grows beyond what it was measured on.

Source: Pollux, section 4.1, prior-driven exploration. Unmeasured terms of the model sit at their optimistic bound, so
a job without a limit could get the whole cluster because of a guess. A job may hold at most twice the largest number of
GPUs on which it was measured. A larger min-gpus overrides this cap.

The paper starts every job on one GPU. Here a job that was never measured may start on `policy.start_gpus` of one node:
most trainings scale within a node, and every doubling costs a move. All unmeasured jobs of a user together get at most
the user's equal share of the GPUs, because nobody has seen yet how well they use GPUs (`cycle.trusted_reports`). A
decision halves `start_gpus` as long as it would park a running job for such starts (`polluxd.policy.decision`). Some
jobs must keep their GPUs and have not reported a training step in their present attempt. Their GPUs count against the
share: otherwise a user could exceed it by submitting jobs that never report, or report once and are requeued, one after
another.
"""

from __future__ import annotations

from collections import Counter
from math import ceil

from polluxd.config.settings import PolicySettings
from polluxd.model import SnapshotJob
from polluxd.policy.domains import Domain

GROWTH = 2


def measured_on(job: SnapshotJob) -> int:
    """Return the most GPUs that the job was measured on; 0: none yet."""
    # The sizes at which earlier runs of the same training were measured count, until this run contradicts them.
    return max(job.report.explored_gpus, job.report.prior_gpus) if job.report is not None else 0


def _seen_to_train(job: SnapshotJob, attempt: int) -> bool:
    """Return whether this attempt, or a later one, reported a training step."""
    report = job.report
    return report is not None and report.attempt >= attempt and report.first_step_at is not None


class Caps:
    """The most GPUs that measurements justify, for the jobs of a domain."""

    def __init__(self, domain: Domain, settings: PolicySettings) -> None:
        users = {job.user for job in domain.jobs}
        share = ceil(domain.capacity / max(len(users), 1))
        most = min(settings.start_gpus, domain.gpus_per_node)
        silent = Counter[str]()
        dividing: dict[str, list[int]] = {}
        for job in domain.jobs:
            if job.pinned and job.placement and not _seen_to_train(job, job.attempt):
                silent[job.user] += job.placement.gpus
            elif not measured_on(job):
                dividing.setdefault(job.user, []).append(job.job_id)
        self._start: dict[int, int] = {}
        for user, jobs in dividing.items():
            each, rest = divmod(max(share - silent[user], 0), len(jobs))
            self._start |= {job_id: min(most, each + (n < rest)) for n, job_id in enumerate(jobs)}

    def of(self, job: SnapshotJob) -> int:
        """Return the job's cap, which is never below its min-gpus.

        An unmeasured job starts on min-gpus if its batch size is fixed, since nobody knows yet how it divides, or if it
        is not preemptible, since it would keep what it starts with.
        """
        measured, spec = measured_on(job), job.spec
        if job.attempt and not job.placement and not _seen_to_train(job, job.attempt - 1):
            # Its last attempt held GPUs, and reported no training step on them, whatever earlier ones reported.
            return max(spec.min_gpus, 1)
        if job.report is not None and measured:
            most = min(GROWTH * measured, job.report.most_gpus or GROWTH * measured)
            return max(most, spec.min_gpus)
        start = self._start.get(job.job_id, 1) if spec.adaptive and spec.preemptible else 1
        if job.report is not None:
            # The job has started, but has no fit, or its fit was rejected: it gets no more GPUs than before.
            start = min(start, job.report.gpus)
        return max(start, spec.min_gpus, 1)
