"""Fair share, weights and the cost of a move (Pollux, section 4.2)."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import Snapshot, SnapshotJob
from polluxd.policy import market

Floats = NDArray[np.float64]


class FairShare(NamedTuple):
    """The placement that a speedup is measured against.

    It is an exclusive 1/J of the cluster, packed.
    """

    nodes: int
    gpus: int


def fair_share(capacity: int, jobs: int, gpus_per_node: int, job: SnapshotJob) -> FairShare:
    """Return ceil(GPUs / J) GPUs on as few nodes as hold them.

    The job's own limits bound it.
    """
    share = -(-capacity // max(jobs, 1))
    most = share if job.spec.max_gpus is None else job.spec.max_gpus
    gpus = max(min(share, most), job.spec.min_gpus, 1)
    return FairShare(-(-gpus // gpus_per_node), gpus)


def weights(jobs: Sequence[SnapshotJob], settings: PolicySettings) -> Floats:
    """Return each job's weight [J].

    It is the product of the weights of job, account, user and QOS; each is 1 unless set.
    """
    value = np.array([job.weight for job in jobs], dtype=np.float64)
    if settings.account_weights:
        value *= [settings.account_weights.get(job.account, 1.0) for job in jobs]
    if settings.user_weights:
        value *= [settings.user_weights.get(job.user, 1.0) for job in jobs]
    if settings.qos_weights or settings.job_weights:
        value *= [
            settings.qos_weights.get(job.qos, 1.0) * settings.job_weights.get(str(job.job_id), 1.0)
            for job in jobs
        ]
    # A weight of nothing would divide by zero: such a job comes after all others, but is not forgotten.
    return np.where(np.isfinite(value), np.clip(value, 1e-6, 1e6), 1.0)


def mean_weight(snapshot: Snapshot) -> float:
    """Return the average weight of the snapshot's jobs; 1 without jobs.

    Weights are relative to it.
    """
    found = weights(sorted(snapshot.jobs, key=attrgetter("job_id")), snapshot.settings).tolist()
    return sum(found) / len(found) if found else 1.0


def move_factors(
    jobs: Sequence[SnapshotJob], cost: Floats, owner: NDArray[np.int64], hysteresis: float = 0.0
) -> Floats:
    """Return what a move multiplies a speedup by [O].

    REALLOC = max(T - C, 0) / (T + delta), over 1 + hysteresis.

    T is the job's age. C is the time that the job's moves have cost so far [s]. delta (`cost` [O]) is the expected cost
    of a move to the option, from measurements. `owner` [O] is the option's job. A job that never ran loses nothing by
    starting: its factor is 1. The hysteresis avoids moves back and forth between options whose predictions differ by
    less than their error.
    """
    age = np.maximum(np.array([job.age for job in jobs], dtype=np.float64), 0.0)
    lost = np.maximum(np.array([job.lost_seconds for job in jobs], dtype=np.float64), 0.0)
    total = age[owner] + cost
    # Age and cost are both zero, so the move neither gains nor loses time.
    left = np.where(total > 0, np.maximum(age - lost, 0.0)[owner] / np.where(total > 0, total, 1.0), 1.0)
    started = np.array([job.started for job in jobs], dtype=np.bool_)[owner]
    return np.where(started, left / (1.0 + max(hysteresis, 0.0)), 1.0)


MOST_WORK_FACTOR = 4.0
"""Remaining work changes a weight by this much at most, either way."""


def work_factors(remaining: Sequence[float | None], power: float) -> list[float]:
    """Return the factor of remaining work on each weight: (R / median)^power.

    `remaining`: seconds at the fair share; None if not known, and then the factor is 1. The factor is bounded, so that
    it orders similar jobs and does not starve long jobs.
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


def promptness(
    jobs: Sequence[SnapshotJob], goodput: Floats, fair: Floats, owner: NDArray[np.int64]
) -> tuple[Floats, Floats]:
    """Return promptness [O], and the seconds left at the fair share [J].

    Promptness is the inverse of finish-time fairness: of the time from submission to the predicted end, over the time
    alone on the fair share, whose goodput is `fair` [J] (Themis, Mahajan et al., 2020). An option without goodput has
    promptness 0. A job of unknown length is expected
    to need the median work of the others in seconds, or as much again as it has done.
    """
    left, done = np.array([market.work(job) for job in jobs], dtype=np.float64).reshape(-1, 2).T
    with np.errstate(divide="ignore", invalid="ignore"):
        seconds, done = left / fair, done / fair
        known = seconds[np.isfinite(seconds)]
        usual = float(np.median(known)) if known.size else market.UNKNOWN
        seconds = np.where(np.isfinite(seconds), seconds, np.maximum(done, usual))
        age = np.maximum(np.array([job.age for job in jobs], dtype=np.float64), 0.0)
        finish = age[owner] + (seconds * fair)[owner] / goodput
        inverse = np.where(goodput > 0, (seconds + done)[owner] / np.maximum(finish, 1e-9), 0.0)
    return np.where(np.isfinite(inverse), inverse, 0.0), seconds


MOST_SLOWDOWN = 10.0
"""A job that waits is slowed down by no more: beyond it, the jobs that wait are alike."""
SHORTEST = 300.0
"""Seconds that a job is taken to need at least: a time limit of a minute is no reason to come first."""


def slowdowns(jobs: Sequence[SnapshotJob], fair: Floats) -> Floats:
    """Return how much each job's wait prolongs its time to the end [J].

    It is the wait and the length over the length, where the job starts now; 1 for a job that holds GPUs. The length is
    that of the training at the fair share, whose goodput is `fair` [J]; nan where it is not known. The length is then
    the job's time limit, and `market.UNKNOWN` at most.
    """
    left, done = np.array([market.work(job) for job in jobs], dtype=np.float64).reshape(-1, 2).T
    with np.errstate(divide="ignore", invalid="ignore"):
        length = (left + done) / fair
    limit = np.array(
        [market.UNKNOWN if job.time_limit is None else job.time_limit for job in jobs], np.float64
    )
    length = np.where(np.isfinite(length) & (length > 0), length, np.minimum(limit, market.UNKNOWN))
    waited = np.array([waiting(job) for job in jobs], dtype=np.float64)
    return np.minimum(1.0 + waited / np.maximum(length, SHORTEST), MOST_SLOWDOWN)


def waiting(job: SnapshotJob) -> float:
    """Seconds that the job has been without GPUs; 0 where it holds some."""
    if job.placement:
        return 0.0
    return max(job.age if job.waiting is None else job.waiting, 0.0)
