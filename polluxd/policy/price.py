"""Counts at scale: one price per GPU (Lagrangian relaxation), and an exact program over the jobs at the margin.

At price lambda every job takes its option of largest value - lambda * GPUs, independently of the others. The price
at which the jobs together want just the capacity comes from sorting the increments of every job's concave
hull by value per GPU: no iteration. Its dual value, lambda * capacity + sum_j max(value - lambda * GPUs), bounds
every plan from above. What integrality leaves over is settled exactly among the jobs whose next or last increment
lies nearest the price (the core, after Pisinger 1995 on the multiple-choice knapsack).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import counts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

CORE_JOBS = 96
"""Jobs at the margin that are solved exactly."""
CORE_CAPACITY = 2048
"""The most GPUs that the core may span; it is cut to fit, which bounds the work."""


class Priced(NamedTuple):
    """What a price per GPU leads to."""

    chosen: Ints
    """[J] option numbers."""
    total: float
    bound: float
    """No choice of counts has a larger total."""
    price: float
    """Utility per GPU at the margin."""


def hull(gpus: Ints, value: Floats, start: Ints) -> Bools:
    """[O]: options on the upper concave hull of (GPUs, value) of their job, from its option of no GPUs on.

    Options of a job need not be sorted. Of equal points, the first is kept.
    """
    owner = np.repeat(np.arange(start.size - 1), np.diff(start))
    order = np.lexsort((np.arange(gpus.size), -value, gpus, owner))
    on = np.zeros(gpus.size, dtype=np.bool_)
    left = order
    while left.size:
        k, v, j = gpus[left].astype(np.float64), value[left], owner[left]
        same = j[1:] == j[:-1]
        rise, run = v[1:] - v[:-1], k[1:] - k[:-1]
        with np.errstate(divide="ignore", invalid="ignore"):
            slope = np.where(run > 0, rise / run, -np.inf)
        bad = np.zeros(left.size, dtype=np.bool_)
        # No better than the one before it (nor larger): never on the hull.
        bad[1:] |= same & (rise <= 0)
        # Below the line from the one before to the one after.
        inner = same[:-1] & same[1:] & (slope[1:] > slope[:-1])
        bad[1:-1] |= inner
        # Neighbours are judged against one another: only every other of a run goes at a time.
        again = bad[1:] & bad[:-1]
        bad[1:] &= ~again
        if not np.any(bad):
            break
        left = left[~bad]
    on[left] = True
    return on


def solve(gpus: Ints, value: Floats, start: Ints, capacity: int) -> Priced:
    """Options [J] of near-largest total value within `capacity`, with the dual bound; arguments as `counts.solve`.

    Every job has an option of no GPUs. Deterministic; O(options log options) time plus a bounded core.
    """
    jobs = start.size - 1
    if jobs == 0:
        return Priced(np.zeros(0, dtype=np.int64), 0.0, 0.0, 0.0)
    points = np.flatnonzero(hull(gpus, value, start))
    owner = np.repeat(np.arange(jobs), np.diff(start))[points]
    order = np.lexsort((gpus[points], owner))
    points, owner = points[order], owner[order]
    first = np.searchsorted(owner, np.arange(jobs))
    step = np.flatnonzero(owner[1:] == owner[:-1]) + 1
    run = gpus[points[step]] - gpus[points[step - 1]]
    slope = (value[points[step]] - value[points[step - 1]]) / run
    ranking = np.lexsort((step, -slope))
    taken_up_to = np.cumsum(run[ranking])
    broken = int(np.searchsorted(taken_up_to, capacity, side="right"))
    price = float(slope[ranking[broken]]) if broken < ranking.size else 0.0
    # Increments of one job come in order of slope, so those before the break are a prefix of its hull.
    taken = np.bincount(owner[step[ranking[:broken]]], minlength=jobs)
    chosen = points[first + taken]
    bound = price * capacity + float(np.maximum.reduceat(value - price * gpus, start[:-1]).sum())
    chosen = _core(gpus, value, start, capacity, chosen, owner[step[ranking]], broken)
    total = float(value[chosen].sum())
    return Priced(chosen, total, max(bound, total), price)


def _core(
    gpus: Ints, value: Floats, start: Ints, capacity: int, chosen: Ints, margin: Ints, broken: int
) -> Ints:
    """Settle the jobs nearest the break exactly, all others held at their choice."""
    near: list[int] = []
    room = capacity - int(gpus[chosen].sum())
    for distance in range(max(broken, margin.size - broken)):
        for position in (broken + distance, broken - 1 - distance):
            if 0 <= position < margin.size and int(margin[position]) not in near:
                job = int(margin[position])
                if room + int(gpus[chosen[job]]) > CORE_CAPACITY:
                    continue
                near.append(job)
                room += int(gpus[chosen[job]])
        if len(near) >= CORE_JOBS:
            break
    if not near:
        return chosen
    near.sort()
    own = np.concatenate([np.arange(start[j], start[j + 1]) for j in near])
    begin = np.concatenate([[0], np.cumsum([start[j + 1] - start[j] for j in near])])
    settled, total = counts.solve(gpus[own], value[own], begin, room)
    if total >= float(value[chosen[near]].sum()):
        chosen = chosen.copy()
        chosen[near] = own[settled]
    return chosen
