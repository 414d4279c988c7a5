"""Bound how good any plan could be, where the fitness hides differences.

With powers of -2 and below, utilities order plans more finely than the fitness shows. The counts alone promise too
much where nodes are tight. There the assignment program, which knows the nodes, computes a second bound; on larger
clusters the bound by node patterns takes its place. The program bounds the fitness' own sum, or under max-min the
highest level that all jobs can reach at once.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import assignment, objective, patterns
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]

CERTAIN = 1e-3
"""A plan this near its bound needs no better one."""
_SLACK = 1e-6
"""What the program's tolerances may add, relative to the plan's own sum."""


def tighten(seating: Seating, x: Floats, power: float, bound: float) -> float:
    """Return the lowest known bound on what the fitness measures.

    For finite powers it bounds the sum that the fitness adds up, under max-min the fitness itself. `x` [J] belongs to
    the plan at hand. `bound` is the bound from the counts.
    """
    table = seating.table
    if not table.jobs:
        return bound
    weight = table.weight[table.owner]
    stay = table.rating
    move = stay * table.factor
    if np.isfinite(power):
        return _of_sum(seating, objective.plain(x, table.weight, power), stay, move, weight, power, bound)
    return _of_worst(
        seating,
        objective.fitness(x, table.weight, power),
        (stay + objective.FLOOR) / weight,
        (move + objective.FLOOR) / weight,
        bound,
    )


def _of_sum(
    seating: Seating, own: Floats, stay: Floats, move: Floats, weight: Floats, power: float, bound: float
) -> float:
    total = float(own.sum())
    if bound - total <= CERTAIN * abs(power * total):
        return bound
    # No better plan has an option that costs more than this whole plan does: cut there, the numbers keep their digits.
    found = _limit(
        seating,
        np.maximum(objective.plain(stay, weight, power), total),
        np.maximum(objective.plain(move, weight, power), total),
    )
    return min(bound, max(found - _SLACK * total, total))


def _of_worst(seating: Seating, worst: float, stay: Floats, move: Floats, bound: float) -> float:
    if bound <= worst * (1 + CERTAIN):
        return bound
    levels = np.unique(np.concatenate([stay, move]))
    levels = levels[(levels > worst * (1 + 1e-12)) & (levels <= bound)]
    low, high = -1, levels.size - 1
    # All jobs may reach level `low` together; they cannot reach a level above `high`; -1 is the present plan.
    while low < high:
        middle = (low + high + 1) // 2
        level = float(levels[middle])
        if _limit(seating, np.where(stay >= level, 0.0, -1.0), np.where(move >= level, 0.0, -1.0)) >= -0.5:
            low = middle
        else:
            high = middle - 1
    return worst if low < 0 else float(levels[low])


def _limit(seating: Seating, stay: Floats, move: Floats) -> float:
    """Return a bound on the sum of these values per option.

    It comes from the assignment program, or from node patterns where that program is too large.
    """
    other = seating.valued(stay, move)
    found = assignment.limit(other)
    return found if np.isfinite(found) else patterns.limit(other)
