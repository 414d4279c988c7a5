"""Improve and bound a plan whose utilities hide what the fitness shows.

With powers of -2 and below, utilities order plans by the jobs without GPUs first. Their values then differ by too many
digits for an integer program. Once the set of running jobs is known, the program can use the terms of the fitness
instead. `worst_off` does the same for max-min.
"""

from __future__ import annotations

import numpy as np

from polluxd.policy import assignment, objective, patterns
from polluxd.policy.placement import Seating

CERTAIN = 1e-3
"""A plan this near its bound needs no better one, relative to the bound."""
_SLACK = 1e-6
"""What the program's tolerances may add, relative to the plan's own sum."""


def improve(seating: Seating, power: float, bound: float) -> float:
    """Take a better plan where a program finds one; return the lowest bound.

    For finite powers. Both bounds are on the sum that the fitness adds up; `bound` is that from the counts.
    """
    table = seating.table
    if not table.jobs:
        return bound
    option = np.array(seating.option)
    x, weight = table.x(option, seating.packing.moved()), table.weight[table.owner]
    total = float(objective.plain(x, table.weight, power).sum())
    if bound - total <= CERTAIN * abs(power * total):
        return bound
    # A better plan has no option that costs more than this whole plan. Costs that are cut there fit into float64.
    other = seating.valued(
        np.maximum(objective.plain(table.rating, weight, power), total),
        np.maximum(objective.plain(table.rating * table.factor, weight, power), total),
    )
    found = assignment.improve(other)
    if not np.isfinite(found):
        found = patterns.improve(other)
    return min(bound, max(found - _SLACK * total, total))
