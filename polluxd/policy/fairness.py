"""Fair share, weights, and the price of a re-allocation (Pollux, sections 4.2 and 4.2.1)."""

from __future__ import annotations

from typing import NamedTuple

from polluxd.model import Job, Settings

HYSTERESIS = 0.05
"""A running job moves only where its predicted goodput rises by more than this; model.md's threshold for a new
batch size, used for the same purpose: predictions are not better than that."""


class FairShare(NamedTuple):
    """The placement against which a job's speedup is measured: an exclusive 1/J of the cluster, packed."""

    nodes: int
    gpus: int


def fair_share(capacity: int, jobs: int, gpus_per_node: int, job: Job) -> FairShare:
    """ceil(GPUs / J) on as few nodes as hold it, kept within what the job's own limits allow."""
    share = -(-capacity // max(jobs, 1))
    most = job.spec.max_gpus if job.spec.max_gpus is not None else max(share, 1)
    gpus = max(min(share, most), job.spec.min_gpus, 1)
    return FairShare(-(-gpus // gpus_per_node), gpus)


def weight(job: Job, settings: Settings) -> float:
    """The job's weight times its account's and its user's; 1 each unless set."""
    value = (
        job.weight * settings.account_weights.get(job.account, 1.0) * settings.user_weights.get(job.user, 1.0)
    )
    # A weight of nothing would divide by zero: such a job comes after all others, but is not forgotten.
    return min(max(value, 1e-6), 1e6)


def reallocation_factor(job: Job) -> float:
    """What a move multiplies the job's speedup by: REALLOC = max(T - C, 0) / (T + delta), and the hysteresis.

    T is the job's age, C the seconds that moves have cost it so far, delta what one more is expected to cost
    (measured). A job that never ran loses nothing by starting: its factor is 1.
    """
    if not job.started:
        return 1.0
    age, cost = max(job.age, 0.0), max(job.reallocation_cost, 0.0)
    if age + cost <= 0:
        return 1.0 / (1.0 + HYSTERESIS)
    return max(age - max(job.lost_seconds, 0.0), 0.0) / (age + cost) / (1.0 + HYSTERESIS)
