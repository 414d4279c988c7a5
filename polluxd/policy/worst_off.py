"""Lift the worst-off job under max-min, by the assignment program.

The utilities of max-min span more digits than the program keeps. Here it is asked twice for less: first which level
all jobs can reach together, then for the best plan at that level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import assignment, objective
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]

CLOSE = 1e-3
"""A plan whose worst-off job is this near the bound needs no better one, relative to the bound."""


def lift(seating: Seating, bound: float) -> None:
    """Take a plan whose worst-off job is better off, where there is one.

    `bound`: a level ((x + floor) / weight) that no plan lifts the worst-off job above.
    """
    table = seating.table
    if not table.jobs:
        return
    weight = table.weight[table.owner]
    x = table.rating
    stay, move = (x + objective.FLOOR) / weight, (x * table.factor + objective.FLOOR) / weight
    option = np.array(seating.option)
    reached = np.where(seating.packing.moved(), move[option], stay[option])
    levels = np.unique(np.concatenate([stay, move]))
    levels = levels[(levels > float(reached.min()) * (1 + CLOSE)) & (levels <= bound)]
    level = _highest(seating, stay, move, levels)
    if level is None:
        return
    # Below the level a job loses more than all others together can.
    below = -2.0 * float(table.weight.sum())
    values = [
        np.where(own >= level, -weight * (own / level) ** objective.MAX_MIN_POWER, below)
        for own in (stay, move)
    ]
    assignment.improve(seating.valued(*values))


def _highest(seating: Seating, stay: Floats, move: Floats, levels: Floats) -> float | None:
    """Return the highest of the levels that all jobs can reach together."""
    low, high = -1, levels.size - 1
    while low < high:
        middle = (low + high + 1) // 2
        at = levels[middle]
        # -1 for each job below the level: the bound tells whether some job must be.
        limit = assignment.limit(
            seating.valued(np.where(stay >= at, 0.0, -1.0), np.where(move >= at, 0.0, -1.0))
        )
        if limit == np.inf:
            return None
        low, high = (middle, high) if limit >= -0.5 else (low, middle - 1)
    return None if low < 0 else float(levels[low])
