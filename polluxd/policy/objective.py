"""The cluster objective: a weighted power mean of fair-share speedups.

Pollux, section 4.2, equation 16.

    FITNESS_p(A) = ( sum_j w_j ((x_j + 1e-3) / w_j)^p / sum_j w_j )^(1/p)        p = 0: geometric mean

x_j is the job's speedup over the GPUs per node, times its move factor where it moves. The solvers add up
`utilities`: numbers per job and option whose sum orders plans as the fitness does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.policy.owners import Group

Floats = NDArray[np.float64]

FLOOR = 1e-3
"""Added to every x, so that a job without GPUs does not make the mean zero (the artifact's)."""
GENTLE = -2.0
"""Below this power, the term of a job without GPUs is too large for float64. Such jobs are counted first."""
MAX_MIN_POWER = -10.0
"""The power that orders plans with the same minimum under max-min fairness."""
_BELOW_LEVEL = -50.0
"""The power that orders plans under max-min fairness if they miss the level that the counts allow."""
_DIGITS = 5e11
"""How much larger than the rest the losses of starved jobs may be in sum."""


FAIR_SHARE = "fair-share"
COMPLETION_TIME = "completion-time"
OBJECTIVES = (COMPLETION_TIME, FAIR_SHARE)


def is_priced(settings: PolicySettings) -> bool:
    """Return whether plans are made at a price per GPU: completion times are."""
    return settings.objective == COMPLETION_TIME


def summed_power(settings: PolicySettings) -> float:
    """Return the power by which plans are ordered; completion times are a plain sum: power 1."""
    return 1.0 if is_priced(settings) else settings.power


def fitness(x: Floats, weight: Floats, power: float) -> float:
    """Return FITNESS_p of the jobs' x [J] under weights [J]; 0 without jobs.

    Computed through logarithms.
    """
    if x.size == 0:
        return 0.0
    z = np.log((x + FLOOR) / weight)
    if power == 0:
        return float(np.exp(np.sum(weight * z) / np.sum(weight)))
    if math.isinf(power):
        return float(np.exp(z.min() if power < 0 else z.max()))
    top = float(np.max(power * z))
    mean = np.sum(weight * np.exp(power * z - top)) / np.sum(weight)
    return float(np.exp((np.log(mean) + top) / power))


def of_total(total: float, weight: float, power: float) -> float:
    """Return the fitness of a plan whose utilities add up to `total`.

    For powers above `GENTLE`; `weight` is of all jobs.
    """
    if weight <= 0:
        return 0.0
    if power == 0:
        return math.exp(min(total / weight, 700.0))
    # A bound may be higher than the value of any plan: the loss is then 0.
    return float((max(np.sign(power) * total, 1e-300) / weight) ** (1.0 / power))


def utilities(x: Floats, weight: Floats, power: float, *, level: float, total: float, jobs: int) -> Floats:
    """A number per option [O] whose sum over jobs is to be as large as can be.

    `weight` [O] adds up to `total` over the `jobs`. `level` is the best level that the worst-off job can reach
    (`worst_level`). Only powers up to `GENTLE` use it. At these powers, one job without GPUs counts more than all other
    jobs together (lexicographic order), and the other jobs are measured relative to the level, so that sums stay
    within the precision of float64.
    """
    if power > GENTLE:
        return plain(x, weight, power)
    # The plan at the level loses at most `total` in all. With counts alone, an option that loses more by itself is
    # never part of the best plan; with nodes, the limit is little higher. So losses beyond it only need the right
    # order. Their range, and the ratio between heavy and light jobs, are as large as the precision of float64 allows.
    digits = _DIGITS / max(jobs, 1) ** 2
    beyond = min(max(math.sqrt(digits), 10.0), 1e5)
    heaviest = min(max(digits / beyond, 1.0), 1e6)
    beyond *= max(total, 1e-300)
    ratio = np.clip(x / (weight * max(level, 1e-300)), 1e-30, 1e30)
    steep: Floats | float = power
    if math.isinf(power):
        steep = np.where(ratio < 1.0 - 1e-9, _BELOW_LEVEL, MAX_MIN_POWER)
    exponent = np.log(weight) + steep * np.log(ratio)
    loss = np.exp(np.minimum(exponent, math.log(beyond)))
    loss *= 1.0 + 1e-5 * np.maximum(exponent - math.log(beyond), 0.0) / np.maximum(-steep, 1.0)
    # Among jobs without GPUs, weights have the same effect as in the fitness.
    lightest = float(np.min(weight, initial=np.inf))
    heavier = np.log(weight / lightest) * (1.0 - max(power, MAX_MIN_POWER))
    return -np.where(x > 0, loss, 2.0 * beyond * jobs * np.exp(np.minimum(heavier, math.log(heaviest))))


def plain(x: Floats, weight: Floats, power: float) -> Floats:
    """Return the terms of the fitness at a finite power.

    They are signed so that more is better.
    """
    z = (x + FLOOR) / weight
    if power == 0:
        return weight * np.log(z)
    with np.errstate(over="ignore"):
        return np.asarray(np.sign(power) * np.minimum(weight * z**power, 1e300))


def highest_worst(
    reached: Floats,
    gpus: NDArray[np.int64],
    start: NDArray[np.int64],
    capacity: int,
    groups: Sequence[Group] = (),
) -> float:
    """Return an upper bound on the level of the worst-off job.

    No choice of counts lifts it higher. It bounds the fitness of max-min.

    `reached` [O]: (x + floor) / w of each option at best; the other arguments as `worst_level`.
    """
    if start.size < 2:
        return math.inf
    levels = np.unique(reached)

    def possible(level: float) -> bool:
        cost = np.minimum.reduceat(np.where(reached >= level, gpus, np.inf), start[:-1])
        return bool(cost.sum() <= capacity) and all(cost[list(g.members)].sum() <= g.ceiling for g in groups)

    low, high = 0, levels.size - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if possible(float(levels[middle])) else (low, middle - 1)
    return float(levels[low])


def worst_level(
    x: Floats,
    weight: Floats,
    gpus: NDArray[np.int64],
    start: NDArray[np.int64],
    capacity: int,
    groups: Sequence[Group] = (),
) -> float:
    """Return the highest level that all jobs which can run may reach together.

    At this level each such job has x_j / w_j at or above it. Options are grouped by job: `start` [J + 1] delimits them
    in `x`, `weight` and `gpus` [O]. The level respects counts and the groups' ceilings, but neither nodes nor
    guarantees.
    """
    ratio = x / weight
    levels = np.unique(ratio[x > 0])
    if levels.size == 0:
        return 0.0

    def cheapest(level: float) -> Floats:
        cost = np.where((ratio >= level) & (x > 0), gpus, np.inf)
        return np.minimum.reduceat(cost, start[:-1])

    def running(level: float) -> int:
        cost = cheapest(level)
        for group in groups:
            members = np.array(group.members)
            order = members[np.argsort(cost[members], kind="stable")]
            cost[order[np.cumsum(cost[order]) > group.ceiling]] = np.inf
        cost = np.sort(cost)
        return int(np.searchsorted(np.cumsum(cost), capacity, side="right"))

    most = running(0.0)
    low, high = 0, levels.size - 1
    while low < high:
        middle = (low + high + 1) // 2
        if running(float(levels[middle])) >= most:
            low = middle
        else:
            high = middle - 1
    return float(levels[low])
