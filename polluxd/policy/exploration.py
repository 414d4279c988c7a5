"""Limit how far a job grows beyond what it was measured on.

Source: Pollux, section 4.1, prior-driven exploration. Unmeasured terms of the model sit at their optimistic bound, so
an unchecked job would leap to the whole cluster on a guess. A job may hold at most twice the most GPUs that it was
measured on; min-gpus lifts that cap.
"""

from __future__ import annotations

from polluxd.model import SnapshotJob

GROWTH = 2


def cap(job: SnapshotJob) -> int:
    """Return the most GPUs that the job's measurements justify.

    The cap is never below the job's min-gpus.
    """
    # What an earlier run of the same training was measured on counts as measured; until this one finds it wrong.
    explored = max(job.report.explored_gpus, job.report.prior_gpus) if job.report is not None else 0
    return max(GROWTH * explored, job.spec.min_gpus, 1)
