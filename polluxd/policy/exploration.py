"""Limit how far a job grows beyond what it was measured on.

Source: Pollux, section 4.1, prior-driven exploration. Unmeasured terms of the model sit at their optimistic bound, so
an unchecked job would leap to the whole cluster on a guess. A job may hold at most twice the most GPUs that it was
measured on; min-gpus lifts that cap.

The paper starts every job on one GPU. Here a job that has never reported may start on `policy.start_gpus` of one node:
most trainings scale within a node, and every doubling costs a move.
"""

from __future__ import annotations

from math import ceil

from polluxd.model import SnapshotJob
from polluxd.policy.domains import Domain
from polluxd.settings import PolicySettings

GROWTH = 2


def start_gpus(domain: Domain, settings: PolicySettings) -> int:
    """Return the most GPUs that a job starts with before it was measured.

    Never more than a user's equal share: nobody has seen yet how the job uses them (`polluxd.trusted_reports`).
    """
    users = len({job.user for job in domain.jobs})
    share = ceil(domain.capacity / max(users, 1))
    return max(1, min(settings.start_gpus, domain.gpus_per_node, share))


def cap(job: SnapshotJob, start: int = 1) -> int:
    """Return the most GPUs that the job's measurements justify.

    The cap is never below the job's min-gpus. `start`: GPUs for a job that has not reported, unless its batch size is
    fixed (nobody knows yet how it divides) or it keeps for good what it starts with.
    """
    if job.report is None:
        return max(start if job.spec.adaptive and job.spec.preemptible else 1, job.spec.min_gpus)
    # What an earlier run of the same training was measured on counts as measured; until this one finds it wrong.
    explored = max(job.report.explored_gpus, job.report.prior_gpus)
    return max(GROWTH * explored, job.spec.min_gpus, 1)
