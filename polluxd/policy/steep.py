"""Improve and bound plans whose utilities hide what the fitness shows.

With powers of -2 and below, utilities order plans by the jobs without GPUs first. Their values then differ by too many
digits for an integer program. Once the set of running jobs is known, the program can use the terms of the fitness
instead (`improve`).

The utilities of max-min span more digits than an integer program can represent, too. So `lift` asks a smaller question:
which level can all jobs reach together? For each job only its smallest options at the level matter, so the assignment
program stays small. If it is still too large, the program of node patterns answers. `lift` then looks for the best
plan at the highest level.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import assignment, objective, patterns
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

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


CLOSE = 1e-3
"""A plan whose worst-off job is this near the bound needs no better one, relative to the bound."""
MOST_SEATS = 500
"""Jobs times nodes up to which the assignment program runs. A larger one takes seconds."""
_ROUNDING = 1e-3
"""If the relaxation has more than this part of a job below a level, then at least one whole job is below it."""


def lift(seating: Seating, bound: float) -> float:
    """Take a plan whose worst-off job is better off, where there is one.

    `bound`: a level ((x + floor) / weight) that no plan lifts the worst-off job above. Returns the lowest such level
    that is known now.
    """
    table = seating.table
    if not table.jobs:
        return bound
    weight = table.weight[table.owner]
    stay = (table.rating + objective.FLOOR) / weight
    move = (table.rating * table.factor + objective.FLOOR) / weight
    reached = _worst(seating, stay, move)
    if bound <= reached * (1 + CLOSE):
        return bound
    levels = np.unique(np.concatenate([stay, move]))
    levels = levels[(levels > reached * (1 + 1e-12)) & (levels <= bound)]
    low, high = -1, levels.size - 1
    while low < high:
        middle = (low + high + 1) // 2
        below = _below(seating, stay >= levels[middle], move >= levels[middle])
        if not np.isfinite(below):
            return bound
        low, high = (middle, high) if below < _ROUNDING else (low, middle - 1)
    if low < 0:
        return reached
    state = seating.state()
    _take(seating, stay, move, float(levels[low]))
    if _worst(seating, stay, move) <= reached:
        seating.restore(state)
    return float(levels[low])


def _worst(seating: Seating, stay: Floats, move: Floats) -> float:
    """Return the level of the worst-off job."""
    option = np.array(seating.option)
    return float(np.where(seating.packing.moved(), move[option], stay[option]).min())


def _below(seating: Seating, stay: Bools, move: Bools) -> float:
    """Return the least number of jobs that can take none of these options [O].

    `stay`: where the job stays, `move`: where it moves. A bound from below; infinite where no program is small enough.
    """
    least = _least(seating, stay, move)
    if len(seating.table.jobs) * len(seating.packing.nodes) <= MOST_SEATS:
        return -assignment.limit(least)
    return -patterns.limit(least)


def _least(seating: Seating, stay: Bools, move: Bools) -> Seating:
    """Return the seating with a utility of -1 for each job below the level.

    Only the least options of each job are listed: one is left out where a move to another needs no more nodes and no
    more GPUs on each.
    """
    table, other = seating.table, seating.valued(np.where(stay, 0.0, -1.0), np.where(move, 0.0, -1.0))
    useful = table.gpus == 0
    fewest: dict[tuple[int, int, int], int] = {}
    wanted = np.flatnonzero((stay & table.kept | move) & ~useful)
    for o in wanted[np.lexsort((table.per_node[wanted], table.nodes[wanted]))].tolist():
        j, kind, per_node = int(table.owner[o]), int(table.kind[o]), int(table.per_node[o])
        # Options on one node have the first of these keys, and serve wherever the nodes of others may lie.
        keys = (j, kind, 0), (j, kind, int(table.racks[o]))
        useful[o] = per_node < min(fewest.get(key, per_node + 1) for key in keys)
        if useful[o] and move[o] and seating.may_move_to(j, o):
            fewest[keys[1]] = per_node
    other.slack = np.where(useful, np.inf, -np.inf)
    return other


def _take(seating: Seating, stay: Floats, move: Floats, level: float) -> None:
    """Take the best plan that is found with all jobs at the level."""
    table = seating.table
    weight = table.weight[table.owner]
    if len(table.jobs) * len(seating.packing.nodes) <= MOST_SEATS:
        assignment.improve(_least(seating, stay >= level, move >= level))
    # Below the level a job loses more than all others together can.
    below = -2.0 * float(table.weight.sum())
    values = [
        np.where(
            own >= level, -weight * (own / level) ** objective.MAX_MIN_POWER, below * (2.0 - own / level)
        )
        for own in (stay, move)
    ]
    other = seating.valued(*values)
    if not np.isfinite(assignment.improve(other)):
        patterns.improve(other)
