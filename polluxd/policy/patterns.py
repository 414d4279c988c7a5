"""Choose options by what nodes can hold together: an integer program.

The solver of the counts assumes that every remaining GPU can be used. But if one job takes three GPUs of a node with
four, no job of two GPUs can use the fourth. In this program every option needs pieces: a number of GPUs on each of its
nodes. Each node is cut into pieces by one pattern (Gilmore and Gomory, 1961, on cutting stock). The size of the program
does not grow with the number of nodes. The program ignores which nodes a job may use, which nodes it holds now, and
that two multi-node jobs share no node. This makes its bound looser, but keeps it valid. HiGHS solves the program. A
limit on the search makes a replay exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, hstack

from polluxd.policy.integer import EQUAL
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Node = tuple[int, int]
"""GPU type by number, -1 where types make no difference; GPUs that it has room for."""

MOST_OPTIONS = 6_000
"""Options up to which the program is tried: with 1,100 it takes some 20 ms."""
LARGEST = 16
"""GPUs of a node up to which its patterns are listed: 231 of them."""
CLOSE = 1e-4
"""A plan this near the bound needs no second program, relative to the bound."""
NODES, SECONDS = 200, 10.0
_GAP = 1e-4
"""Relative distance to its bound at which the program ends."""


def cuts(gpus: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many GPUs into pieces, the largest first."""
    if gpus == 0:
        yield ()
    for first in range(min(gpus, largest or gpus), 0, -1):
        for rest in cuts(gpus - first, first):
            yield (first, *rest)


def improve(seating: Seating) -> float:
    """Take the program's plan where it is better; return a bound on the total.

    The program does not know which nodes the jobs hold. A second program fills the GPUs beside the jobs that stay
    according to the first one.
    The bound is infinite where the program is too large or has no answer.
    """
    table = seating.table
    chosen, bound = solve(seating, table.pinned)
    if chosen is None:
        return bound
    seating.take(chosen)
    stays = table.pinned | table.kept[chosen]
    if stays.any() and seating.total() < bound - CLOSE * abs(bound):
        state = seating.state()
        seating.clear()
        seating.fill(np.where(stays, chosen, table.start[:-1]))
        chosen, _ = solve(seating, stays)
        seating.restore(state)
        if chosen is not None:
            seating.take(chosen)
    return bound


def limit(seating: Seating) -> float:
    """Return a bound on the total of any plan, without changing the seating."""
    return solve(seating, seating.table.pinned)[1]


def solve(seating: Seating, fixed: Bools) -> tuple[Ints | None, float]:
    """Return one option per job [J], and a bound on the total of any plan.

    Jobs that are `fixed` [J] keep what they have. None, and an infinite bound, where the program is too large or has no
    answer.
    """
    table = seating.table
    rooms = _rooms(seating, fixed)
    if table.value.size > MOST_OPTIONS or max((room for _, room in rooms), default=0) > LARGEST:
        return None, np.inf
    kept = sum(seating.utility(j) for j in np.flatnonzero(fixed).tolist())
    listed = ~fixed[table.owner]
    if seating.slack is not None:
        listed &= seating.slack >= 0
    own = np.flatnonzero(listed)
    if own.size == 0:
        return None, float(kept)
    worth, job = seating.worth[own], np.unique(table.owner[own], return_inverse=True)[1].ravel()
    best = np.full(int(job.max()) + 1, -np.inf)
    np.maximum.at(best, job, worth)
    loss = best[job] - worth
    scale = max(float(loss.max()), 1e-300)
    patterns = [(node, Counter(cut)) for node in rooms for cut in cuts(node[1])]
    found = milp(
        np.append(loss / scale, np.zeros(len(patterns))),
        integrality=np.ones(own.size + len(patterns)),
        bounds=Bounds(0, np.inf),
        constraints=_constraints(seating, own, fixed, patterns, rooms),
        options={"node_limit": NODES, "time_limit": SECONDS, "mip_rel_gap": _GAP},
    )
    dual = found.mip_dual_bound
    bound = float(kept + best.sum() - (dual - EQUAL) * scale) if dual is not None else np.inf
    if found.x is None:
        return None, bound if np.isfinite(bound) else np.inf
    chosen = np.where(fixed, seating.option, table.start[:-1])
    taken = own[found.x[: own.size] > 0.5]
    chosen[table.owner[taken]] = taken
    return chosen, bound


def _rooms(seating: Seating, fixed: Bools) -> Counter[Node]:
    """Return how many nodes of each type have room beside the fixed jobs."""
    table, packing = seating.table, seating.packing
    kind = {name: k for k, name in enumerate(table.types)}
    found = Counter[Node]()
    for number, node in enumerate(packing.nodes):
        others = sum(gpus for j, gpus in packing.guests[number].items() if not fixed[j])
        found[kind.get(node.gpu_type, -1), max(int(packing.free[number]) + others, 0)] += 1
    return found


def _constraints(
    seating: Seating,
    own: Ints,
    fixed: Bools,
    patterns: list[tuple[Node, Counter[int]]],
    rooms: Counter[Node],
) -> list[LinearConstraint]:
    """Build the rows: options of a job, pieces, ceilings, nodes of a room."""
    table = seating.table
    job = np.unique(table.owner[own], return_inverse=True)[1].ravel()
    sizes = max(int(table.per_node[own].max(initial=0)), *(room for _, room in rooms))
    kinds = max(len(table.types), 1)
    # A piece's row: its GPU type, then its size. What lies on several types, outside of our rules, asks for none.
    row = np.maximum(table.kind[own], 0) * sizes + table.per_node[own] - 1
    placed = np.flatnonzero((table.nodes[own] > 0) & (table.kind[own] >= 0 if table.types else True))
    pieces = np.zeros((kinds * sizes, own.size + len(patterns)))
    pieces[row[placed], placed] = table.nodes[own][placed]
    of_room = np.zeros((len(rooms), own.size + len(patterns)))
    number = {node: i for i, node in enumerate(rooms)}
    for column, (node, cut) in enumerate(patterns, own.size):
        of_room[number[node], column] = 1.0
        for size, many in cut.items():
            pieces[max(node[0], 0) * sizes + size - 1, column] = -many
    limits, ceilings = _ceilings(seating, own, fixed)
    held = np.concatenate([limits, np.zeros((ceilings.size, len(patterns)))], axis=1)
    most = np.concatenate(
        [np.zeros(kinds * sizes), ceilings, np.array(list(rooms.values()), dtype=np.float64)]
    )
    one = csr_array((np.ones(own.size), (job, np.arange(own.size))), shape=(int(job.max()) + 1, own.size))
    return [
        LinearConstraint(csr_array(np.concatenate([pieces, held, of_room])), -np.inf, most),
        LinearConstraint(hstack([one, csr_array((one.shape[0], len(patterns)))]), 1, 1),
    ]


def _ceilings(seating: Seating, own: Ints, fixed: Bools) -> tuple[Floats, Floats]:
    """Return the GPUs that count towards each ceiling, and what it allows.

    [groups, O]: the GPUs of each option in the group. [groups]: the GPUs that the ceiling still allows.
    """
    table = seating.table
    gpus, owner = table.gpus[own], table.owner[own]
    rows = [np.where(np.isin(owner, g.members), gpus, 0).astype(np.float64) for g in table.groups]
    left = [
        max(g.ceiling - sum(seating.gpus[seating.option[j]] for j in g.members if fixed[j]), 0)
        for g in table.groups
    ]
    return np.array(rows).reshape(len(rows), own.size), np.array(left, dtype=np.float64)
