"""What each option of a job is worth under the objective of the settings: speedups, waits and the cost of moves.

Source of the fair share and of `move_factors`: Pollux, section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import SnapshotJob
from polluxd.policy import market, objective
from polluxd.policy.owners import Group

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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


def move_factors(
    jobs: Sequence[SnapshotJob], cost: Floats, owner: NDArray[np.int64], hysteresis: float = 0.0
) -> Floats:
    """Return what a move multiplies a speedup by [O].

    REALLOC = max(T - C, 0) / (T + delta), over 1 + hysteresis.

    T is the job's age. C is the time that the job's moves have cost so far [s]. delta (`cost` [O]) is the expected cost
    of a move to the option, from measurements. `owner` [O] is the option's job. A job that never ran loses nothing by
    starting: its factor is 1. One that waits has not lost all its time, whatever a clock that has stepped says: on
    GPUs that nobody else wants it starts all the same. The hysteresis avoids moves back and forth between options whose
    predictions differ by less than their error.
    """
    age = np.maximum(np.array([job.age for job in jobs], dtype=np.float64), 0.0)
    lost = np.maximum(np.array([job.lost_seconds for job in jobs], dtype=np.float64), 0.0)
    waits = np.array([not job.placement for job in jobs], dtype=np.bool_)
    remains = np.maximum(age - lost, np.where(waits, market.LEAST_LEFT * age, 0.0))
    total = age[owner] + cost
    # Age and cost are both zero, so the move neither gains nor loses time.
    left = np.where(total > 0, remains[owner] / np.where(total > 0, total, 1.0), 1.0)
    started = np.array([job.started for job in jobs], dtype=np.bool_)[owner]
    return np.where(started, left / (1.0 + max(hysteresis, 0.0)), 1.0)


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


class Rated(NamedTuple):
    """The options before they are valued, by option unless said otherwise."""

    jobs: tuple[SnapshotJob, ...]
    start: Ints
    """[J + 1]"""
    nodes: Ints
    gpus: Ints
    kind: Ints
    goodput: Floats
    x: Floats
    """Speedup over the GPUs per node."""
    kept: Bools
    owner: Ints


class Worth(NamedTuple):
    """Utilities of the options."""

    stay: Floats
    move: Floats
    factor: Floats
    weight: Floats
    """[J]"""
    market: market.Market | None = None


def by_price(
    rated: Rated, weight: Floats, settings: PolicySettings, limited: tuple[Group, ...], capacity: Ints
) -> Worth:
    """Utilities under the objective of completion times: mu_j g_j."""
    offers = market.MarketOptions(rated.gpus, rated.goodput, rated.kind, rated.start, capacity, limited)
    if not rated.jobs:
        return Worth(np.zeros(0), np.zeros(0), np.zeros(0), weight)
    work, done = np.array([market.work(job) for job in rated.jobs], dtype=np.float64).T
    limit = np.array([np.inf if job.time_limit is None else max(job.time_limit, 1.0) for job in rated.jobs])
    found = market.clear(offers, weight, work, done, settings.kappa, limit)
    stay = found.worth[rated.owner] * _gained(rated, settings.least_gain)
    factor = market.paying_factors(
        rated.jobs, found.seconds, _move_costs(rated), rated.owner, settings.hysteresis
    )
    move = stay * factor
    # A running job that is parked pays for its next start: it loses as much as by a move from its placement.
    held = np.maximum.reduceat(np.where(rated.kept, stay * (1.0 - factor), 0.0), rated.start[:-1])
    move -= np.where(rated.gpus == 0, held[rated.owner], 0.0)
    return Worth(stay, move, factor, weight, found)


def _gained(rated: Rated, least_gain: float) -> Floats:
    """Return the goodput [O] without the least that the GPUs have to add.

    Each GPU has to add this share of the largest goodput per GPU that the job has on its type. A pinned job loses
    nothing: it has one option.
    """
    if least_gain <= 0:
        return rated.goodput
    own = rated.owner * (int(rated.kind.max(initial=-1)) + 2) + rated.kind + 1
    best = np.zeros(int(own.max(initial=-1)) + 1)
    np.maximum.at(best, own, rated.goodput / np.maximum(rated.gpus, 1))
    return np.asarray(rated.goodput - least_gain * best[own] * rated.gpus)


def by_share(
    rated: Rated,
    weight: Floats,
    settings: PolicySettings,
    limited: tuple[Group, ...],
    capacity: int,
) -> Worth:
    """Value options under the paper's objective: powers of speedups."""
    jobs, start, gpus, x = rated.jobs, rated.start, rated.gpus, rated.x
    power = settings.power
    factor = move_factors(jobs, _move_costs(rated), rated.owner, settings.hysteresis)
    w, moved = weight[rated.owner], x * factor
    level, total = 0.0, float(weight.sum())
    if power <= objective.GENTLE and jobs:
        offer = max(capacity, int(gpus[start[:-1]].sum()))
        level = objective.worst_level(np.where(rated.kept, x, moved), w, gpus, start, offer, limited)
    stay = objective.utilities(x, w, power, level=level, total=total, jobs=len(jobs))
    move = objective.utilities(moved, w, power, level=level, total=total, jobs=len(jobs))
    return Worth(stay, move, factor, weight)


def _move_costs(rated: Rated) -> Floats:
    """Return the seconds [O] that the move to each option costs.

    A move that only adds or gives up nodes like those held is made in place.
    """
    cost = np.array([job.move_cost for job in rated.jobs], dtype=np.float64)[rated.owner]
    in_place = np.array([np.nan if j.resize_cost is None else j.resize_cost for j in rated.jobs], np.float64)
    if not np.all(np.isnan(in_place)):
        held = np.array([j.placement.gpus_per_node for j in rated.jobs], dtype=np.int64)[rated.owner]
        nodes = np.array([len(j.placement.nodes) for j in rated.jobs], dtype=np.int64)[rated.owner]
        alike = (rated.gpus == rated.nodes * held) & (rated.nodes != nodes) & (rated.gpus > 0)
        cost = np.where(alike & ~np.isnan(in_place)[rated.owner], in_place[rated.owner], cost)
    return np.maximum(cost, 0.0)
