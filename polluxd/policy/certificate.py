"""Bound how good any plan could be, where the fitness hides differences.

With powers of -2 and below, utilities order plans more finely than the fitness shows. The counts alone promise too
much where nodes are tight. There the assignment program, which knows the nodes, computes a second bound; on larger
clusters the bound by node patterns takes its place. `worst_off` does this for max-min.
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
    """Return the lowest known bound on the sum that the fitness adds up.

    For finite powers. `x` [J] belongs to the plan at hand. `bound` is the bound from the counts.
    """
    table = seating.table
    if not table.jobs:
        return bound
    total = float(objective.plain(x, table.weight, power).sum())
    if bound - total <= CERTAIN * abs(power * total):
        return bound
    weight = table.weight[table.owner]
    # No better plan has an option that costs more than this whole plan does: cut there, the numbers keep their digits.
    found = _limit(
        seating,
        np.maximum(objective.plain(table.rating, weight, power), total),
        np.maximum(objective.plain(table.rating * table.factor, weight, power), total),
    )
    return min(bound, max(found - _SLACK * total, total))


def _limit(seating: Seating, stay: Floats, move: Floats) -> float:
    """Return a bound on the sum of these values per option.

    It comes from the assignment program, or from node patterns where that program is too large.
    """
    other = seating.valued(stay, move)
    found = assignment.limit(other)
    return found if np.isfinite(found) else patterns.limit(other)
