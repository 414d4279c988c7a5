"""Fair share, weights, and the price of a re-allocation (Pollux, sections 4.2 and 4.2.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from polluxd.model import Job, Settings, Snapshot


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
    """The job's weight times its account's, its user's and its QOS'; 1 each unless set."""
    value = (
        job.weight * settings.account_weights.get(job.account, 1.0) * settings.user_weights.get(job.user, 1.0)
    )
    if settings.qos_weights or settings.job_weights:
        value *= settings.qos_weights.get(job.qos, 1.0) * settings.job_weights.get(str(job.job_id), 1.0)
    if not math.isfinite(value):
        return 1.0
    # A weight of nothing would divide by zero: such a job comes after all others, but is not forgotten.
    return min(max(value, 1e-6), 1e6)


def mean_weight(snapshot: Snapshot) -> float:
    """The average weight of the snapshot's jobs, to which weights are taken relative; 1 where there is none."""
    weights = [weight(job, snapshot.settings) for job in sorted(snapshot.jobs, key=lambda j: j.job_id)]
    return sum(weights) / len(weights) if weights else 1.0


def reallocation_factor(job: Job, hysteresis: float = 0.0) -> float:
    """What a move multiplies the job's speedup by: REALLOC = max(T - C, 0) / (T + delta), over 1 + hysteresis.

    T is the job's age, C the seconds that moves have cost it so far, delta what one more is expected to cost
    (measured). A job that never ran loses nothing by starting: its factor is 1. The hysteresis is what keeps
    predictions that differ by no more than they err from moving a job back and forth.
    """
    if not job.started:
        return 1.0
    age, cost = max(job.age, 0.0), max(job.reallocation_cost, 0.0)
    if age + cost <= 0:
        return 1.0 / (1.0 + max(hysteresis, 0.0))
    return max(age - max(job.lost_seconds, 0.0), 0.0) / (age + cost) / (1.0 + max(hysteresis, 0.0))


MOST_WORK_FACTOR = 4.0
"""Remaining work changes a weight by this much at most, either way."""


def work_factors(remaining: Sequence[float | None], power: float) -> list[float]:
    """What remaining work [s at the fair share; None: not known] multiplies each job's weight by: (R / median)^power.

    Bounded, and 1 where not known, so that it orders jobs of one kind without starving the long ones.
    """
    known = sorted(r for r in remaining if r is not None and r > 0)
    if not power or not known:
        return [1.0] * len(remaining)
    median = known[len(known) // 2]
    return [
        1.0
        if r is None
        else min(max((max(r, 1e-9) / median) ** power, 1 / MOST_WORK_FACTOR), MOST_WORK_FACTOR)
        for r in remaining
    ]


def waiting(job: Job) -> float:
    """Seconds that the job has been without GPUs; 0 where it holds some."""
    if job.placement:
        return 0.0
    return max(job.age if job.waiting is None else job.waiting, 0.0)
