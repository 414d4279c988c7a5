"""Counts at scale: a price per GPU, and an exact core at the margin.

The price is a Lagrangian relaxation. At price lambda every job takes the option with the largest value - lambda * GPUs,
independently of other jobs. One price makes the jobs together want exactly the capacity. To find it, sort the
increments of every job's concave hull by value per GPU; no iteration is needed. The dual value, lambda * capacity +
sum_j max(value - lambda * GPUs), bounds every plan from above.

A few GPUs then remain, because options are whole. Two exact searches assign them. The first covers the core: the jobs
whose next or last increment lies nearest the price (Pisinger, 1995, on the multiple-choice knapsack). The second covers
all jobs whose option the bound does not fix. If these are few, the choice is proven to be the best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import counts
from polluxd.policy.counts import frontiers, owners
from polluxd.policy.owners import Group, nested, of_job

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

CORE_JOBS = 96
"""Jobs at the margin that are solved exactly."""
CORE_CAPACITY = 2048
"""The most GPUs that the core may span; it is cut to fit, which bounds the work."""

CORE_WORK = 500_000
"""Options times GPUs that are settled before any core is: no more work than a core's."""
EXACT_WORK = 4_000_000
"""Options times GPUs up to which counts are solved by dynamic programming: some 50 ms."""
_ROUNDING = 1e-12


class Priced(NamedTuple):
    """What a price per GPU leads to."""

    chosen: Ints
    """[J] option numbers."""
    total: float
    bound: float
    """No choice of counts has a larger total."""
    price: float
    """Utility per GPU at the margin."""
    proven: bool = False
    """No choice at all is better."""
    reach: Floats | None = None
    """[O]: no choice that has the option has a larger total; None: not known."""


def hull(gpus: Ints, value: Floats, owner: Ints) -> Ints:
    """Return the options on their job's upper concave hull, by job and GPUs.

    The hull is of (GPUs, value), from the option of no GPUs on. Options of a job (`owner` [O]) need not be sorted. Of
    equal points, the first is kept.
    """
    left = frontiers(gpus, value, owner)
    k, v, j = gpus[left].astype(np.float64), value[left], owner[left]
    while left.size > 2:
        same = j[1:] == j[:-1]
        # Within a job, options rise in GPUs and in value. Between two jobs, any change is possible.
        slope = (v[1:] - v[:-1]) / np.where(same, k[1:] - k[:-1], 1.0)
        # Below the line from the one before to the one after.
        bad = same[:-1] & same[1:] & (slope[1:] > slope[:-1])
        # Whether a point goes depends on its neighbours, so of a run of points only every second goes at a time.
        bad[1:] &= ~(bad[1:] & bad[:-1])
        if not bad.any():
            break
        kept = np.ones(left.size, dtype=np.bool_)
        kept[1:-1] = ~bad
        left, k, v, j = left[kept], k[kept], v[kept], j[kept]
    return left


def solve(gpus: Ints, value: Floats, start: Ints, capacity: int, groups: Sequence[Group] = ()) -> Priced:
    """Choose options [J] of near-largest total value.

    They keep within `capacity` and the groups' limits; arguments as `counts.solve`.

    Groups may overlap in any way here. Every job has an option of no GPUs. Deterministic; O(options log options) time
    plus a bounded core.
    """
    jobs = start.size - 1
    if jobs == 0:
        return Priced(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0)
    job_of = owners(start)
    points = hull(gpus, value, job_of)
    owner = job_of[points]
    step = np.flatnonzero(owner[1:] == owner[:-1]) + 1
    run = gpus[points[step]] - gpus[points[step - 1]]
    slope = (value[points[step]] - value[points[step - 1]]) / run
    ranking = np.lexsort((step, -slope))
    ranked = _Increments(owner[step[ranking]], run[ranking], slope[ranking])
    taken = _take_within(ranked, jobs, capacity, groups) if groups else _take(ranked, jobs, capacity)
    chosen = points[np.searchsorted(owner, np.arange(jobs)) + taken.steps]
    dual = taken
    if any(g.floor for g in groups):
        # Guarantees only lower what can be reached: the prices without them bound it, and more tightly.
        dual = _take_within(ranked, jobs, capacity, [replace(g, floor=0) for g in groups])
    surcharge = np.zeros(jobs)
    for group, extra in zip(groups, dual.surcharges, strict=True):
        surcharge[list(group.members)] += extra
    paid = (dual.price + surcharge)[job_of] * gpus
    net = value - paid
    top = np.maximum.reduceat(net, start[:-1])
    bound = dual.price * capacity + float(top.sum())
    bound += sum(extra * g.ceiling for g, extra in zip(groups, dual.surcharges, strict=True) if extra)
    problem = _Problem(gpus, value, start, capacity, groups)
    loss = top[job_of] - net
    reach = bound - loss
    least = min(bound, float(np.maximum.reduceat(value, start[:-1]).sum()))
    # The bound ignores guarantees, so it does not know what they cost.
    plain = not any(g.floor for g in groups)
    settled = _settle(problem, chosen, loss, bound, CORE_JOBS, CORE_WORK) if plain else None
    if settled is None:
        chosen = _core(problem, chosen, ranked.job, taken.broken)
        if plain and float(value[chosen].sum()) < least:
            settled = _settle(problem, chosen, loss, bound, jobs, EXACT_WORK)
    if settled is not None:
        total = float(value[settled].sum())
        return Priced(settled, total, total, taken.price, True, reach)
    total = float(value[chosen].sum())
    return Priced(chosen, total, max(least, total), taken.price, plain and total >= least, reach)


class _Increments(NamedTuple):
    """Steps up the hulls of all jobs, steepest first.

    The steps of one job keep their order.
    """

    job: Ints
    run: Ints
    slope: Floats


class _Taken(NamedTuple):
    steps: Ints
    """[J]: steps taken up each job's hull."""
    price: float
    broken: int
    """Place in the ranking of the first increment that found too little capacity."""
    surcharges: tuple[float, ...]
    """Per group: what its ceiling adds to the price of a GPU."""


def _take(ranked: _Increments, jobs: int, capacity: int) -> _Taken:
    """Take increments down the ranking while they fit.

    The increments before the break are a prefix of each job's hull.
    """
    broken = int(np.searchsorted(np.cumsum(ranked.run), capacity, side="right"))
    price = float(ranked.slope[broken]) if broken < ranked.slope.size else 0.0
    return _Taken(np.bincount(ranked.job[:broken], minlength=jobs), price, broken, ())


def _take_within(ranked: _Increments, jobs: int, capacity: int, groups: Sequence[Group]) -> _Taken:
    """Take increments under ceilings and guarantees.

    First what guarantees ask for, then down the ranking.
    """
    belongs = of_job(groups, jobs)
    room = [g.ceiling for g in groups]
    owed = [g.floor for g in groups]
    blocked_at = [0.0] * len(groups)
    steps = np.zeros(jobs, dtype=np.int64)
    done = np.zeros(ranked.job.size, dtype=np.bool_)
    left, price, broken = capacity, 0.0, ranked.job.size
    for guarantees in (True, False) if any(owed) else (False,):
        stopped: set[int] = set()
        for i, (j, run) in enumerate(zip(ranked.job.tolist(), ranked.run.tolist(), strict=True)):
            if done[i] or j in stopped:
                continue
            if guarantees and not any(owed[g] >= run for g in belongs[j]):
                # A step beyond the guarantee is not owed, and the steps after it stand on it.
                stopped.add(j)
                continue
            full = [g for g in belongs[j] if room[g] < run]
            if full or run > left:
                stopped.add(j)
                for g in full if not guarantees else ():
                    blocked_at[g] = blocked_at[g] or float(ranked.slope[i])
                if not full and not guarantees and broken == ranked.job.size:
                    price, broken = float(ranked.slope[i]), i
                continue
            done[i] = True
            steps[j] += 1
            left -= run
            for g in belongs[j]:
                room[g] -= run
                owed[g] -= run
    # Accounts before their users: an inner ceiling only charges what the outer one does not.
    surcharges = [0.0] * len(groups)
    for g in reversed(range(len(groups))):
        outer = sum(surcharges[h] for h in belongs[groups[g].members[0]] if h > g)
        surcharges[g] = max(blocked_at[g] - price - outer, 0.0)
    return _Taken(steps, price, broken, tuple(surcharges))


class _Problem(NamedTuple):
    gpus: Ints
    value: Floats
    start: Ints
    capacity: int
    groups: Sequence[Group]


def _settle(problem: _Problem, chosen: Ints, loss: Floats, bound: float, most: int, work: int) -> Ints | None:
    """Return the best choice of all if few jobs are open; else None.

    `work` bounds options times GPUs.

    `loss` [O] is what an option loses at the price. If it exceeds the gap between the dual value and a known choice, no
    better choice has this option. Most jobs then have one option left. An exact search decides the other jobs.
    """
    gpus, value, start, capacity, groups = problem
    gap, rounding = bound - float(value[chosen].sum()), _ROUNDING * float(np.abs(value[chosen]).sum())
    if gap <= rounding * 1e-2:
        return chosen
    if not np.isfinite(gap) or not nested(groups):
        return None
    keep = loss <= gap * (1 + 1e-9) + rounding
    keep[chosen] = True
    left = np.add.reduceat(keep.astype(np.int64), start[:-1])
    free = np.flatnonzero(left > 1)
    room = capacity - int(gpus[np.delete(chosen, free)].sum())
    own = np.flatnonzero(keep & np.repeat(left > 1, np.diff(start)))
    if free.size > most or own.size * room > work:
        return None
    near = {j: number for number, j in enumerate(free.tolist())}
    limits = [_within(g, near, gpus[chosen]) for g in groups]
    begin = np.concatenate([[0], np.cumsum(left[free])])
    settled, total = counts.solve(gpus[own], value[own], begin, room, [g for g in limits if g.members])
    if total <= float(value[chosen[free]].sum()):
        return chosen
    chosen = chosen.copy()
    chosen[free] = own[settled]
    return chosen


def _core(problem: _Problem, chosen: Ints, margin: Ints, broken: int) -> Ints:
    """Solve the jobs nearest the break exactly; hold all others."""
    gpus, value, start = problem.gpus, problem.value, problem.start
    near: dict[int, int] = {}
    room = problem.capacity - int(gpus[chosen].sum())
    for distance in range(max(broken, margin.size - broken)):
        for position in (broken + distance, broken - 1 - distance):
            job = int(margin[position]) if 0 <= position < margin.size else -1
            if job >= 0 and job not in near and room + int(gpus[chosen[job]]) <= CORE_CAPACITY:
                near[job] = 0
                room += int(gpus[chosen[job]])
        if len(near) >= CORE_JOBS:
            break
    if not near:
        return chosen
    jobs = sorted(near)
    near = {j: number for number, j in enumerate(jobs)}
    groups = [_within(g, near, gpus[chosen]) for g in problem.groups]
    groups = [g for g in groups if g.members]
    if not nested(groups):
        return chosen
    own = np.concatenate([np.arange(start[j], start[j + 1]) for j in jobs])
    begin = np.concatenate([[0], np.cumsum([start[j + 1] - start[j] for j in jobs])])
    settled, total = counts.solve(gpus[own], value[own], begin, room, groups)
    # Change the choice only for a gain: of equal choices, the present one follows the jobs' order.
    if total > float(value[chosen[jobs]].sum()) * (1 + np.copysign(1e-12, value[chosen[jobs]].sum())):
        chosen = chosen.copy()
        chosen[jobs] = own[settled]
    return chosen


def _within(group: Group, near: dict[int, int], held: Ints) -> Group:
    """Return the limits that the group leaves to its members in the core."""
    outside = int(sum(held[j] for j in group.members if j not in near))
    return replace(group.less(outside), members=tuple(near[j] for j in group.members if j in near))
