"""What each option of a job is worth under the objective of the settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import SnapshotJob
from polluxd.policy import fairness, market, objective
from polluxd.policy.ceilings import Group
from polluxd.policy.owners import within_owner

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


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
    x: Floats
    """What the objective compares, where the job does not move."""
    market: market.Market | None = None


def by_price(
    rated: Rated, weight: Floats, settings: PolicySettings, limited: tuple[Group, ...], capacity: Ints
) -> Worth:
    """Utilities under the objective of completion times: mu_j g_j."""
    offers = market.MarketOptions(rated.gpus, rated.goodput, rated.kind, rated.start, capacity, limited)
    if not rated.jobs:
        return Worth(np.zeros(0), np.zeros(0), np.zeros(0), weight, rated.x)
    work, done = np.array([market.work(job) for job in rated.jobs], dtype=np.float64).T
    limit = np.array([np.inf if job.time_limit is None else max(job.time_limit, 1.0) for job in rated.jobs])
    found = market.clear(offers, weight, work, done, settings.kappa, limit)
    stay = found.worth[rated.owner] * rated.goodput
    factor = market.paying_factors(
        rated.jobs, found.seconds, _move_costs(rated), rated.owner, settings.hysteresis
    )
    move = stay * factor
    # A running job that is parked pays for its next start: it loses as much as by a move from its placement.
    held = np.maximum.reduceat(np.where(rated.kept, stay * (1.0 - factor), 0.0), rated.start[:-1])
    move -= np.where(rated.gpus == 0, held[rated.owner], 0.0)
    return Worth(stay, move, factor, weight, rated.x, found)


def by_share(
    rated: Rated,
    weight: Floats,
    settings: PolicySettings,
    limited: tuple[Group, ...],
    capacity: int,
    fair: Floats,
) -> Worth:
    """Value options under the paper's objective: powers of speedups.

    Under max-min finish-time fairness, of promptness instead. `fair` [J]: goodput at the fair share.
    """
    jobs, start, gpus, x = rated.jobs, rated.start, rated.gpus, rated.x
    power, costs = objective.summed_power(settings), _move_costs(rated)
    if settings.objective == objective.COMPLETION_TIME:
        x, seconds = fairness.promptness(jobs, rated.goodput, fair, rated.owner)
        factor = market.paying_factors(jobs, seconds, costs, rated.owner, settings.hysteresis)
    else:
        factor = fairness.move_factors(jobs, costs, rated.owner, settings.hysteresis)
        if settings.remaining_work_power:
            remaining = [_remaining(job, alone) for job, alone in zip(jobs, fair.tolist(), strict=True)]
            factors = np.array(fairness.work_factors(remaining, settings.remaining_work_power))
            weight = within_owner(weight, factors, jobs, settings.fairness_per)
    w, moved = weight[rated.owner], x * factor
    level, total = 0.0, float(weight.sum())
    if power <= objective.GENTLE and jobs:
        offer = max(capacity, int(gpus[start[:-1]].sum()))
        level = objective.worst_level(np.where(rated.kept, x, moved), w, gpus, start, offer, limited)
    stay = objective.utilities(x, w, power, level=level, total=total, jobs=len(jobs))
    move = objective.utilities(moved, w, power, level=level, total=total, jobs=len(jobs))
    return Worth(stay, move, factor, weight, x)


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


def _remaining(job: SnapshotJob, fair: float) -> float | None:
    """Seconds that the job still needs at its fair share.

    None where it has not said how long it trains.
    """
    report = job.report
    if report is None or report.params is None or report.target is None or not 0 < fair < np.inf:
        return None
    return max(report.target - report.progress, 0.0) * report.limits.initial / fair


def overdue(
    jobs: Sequence[SnapshotJob],
    pinned: Bools,
    settings: PolicySettings,
    stay: Floats,
    move: Floats,
    start: Ints,
) -> Floats:
    """Return the cost [J] of leaving an overdue job without GPUs.

    Overdue: it has waited past the starvation bound. The cost is larger than all utilities together.
    It grows with the time past the bound: if not all overdue jobs fit, the job that has waited longest comes first.
    """
    penalty = np.zeros(len(jobs))
    bound = settings.starvation_bound
    if bound is None or not jobs:
        return penalty
    late = np.array([fairness.waiting(j) / max(bound, 1.0) for j in jobs])
    late[pinned] = 0.0
    if not np.any(late >= 1):
        return penalty
    low, high = np.minimum(stay, move), np.maximum(stay, move)
    everything = float((np.maximum.reduceat(high, start[:-1]) - np.minimum.reduceat(low, start[:-1])).sum())
    return np.where(late >= 1, (1.0 + everything) * np.minimum(late, 10.0), 0.0)
