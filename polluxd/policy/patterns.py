"""Bound a plan's total by what nodes can hold together.

Counts alone promise that every GPU left over can be used. But if one job takes three GPUs of four, no job of two GPUs
can use the fourth. Here every option asks for pieces: so many GPUs on each of its nodes. One pattern cuts every node
into pieces (Gilmore and Gomory, 1961, on cutting stock). The linear relaxation gives a price per size of piece. At
any such prices, the worth of the options and of the patterns bounds every plan, so the program's tolerances are no
part of the bound. Two facts are left out, which only loosens the bound: which nodes a job may use, and that two jobs
over several nodes share none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, hstack

from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_OPTIONS = 6_000
"""Options up to which the program is tried: some 20 ms."""
LARGEST = 16
"""GPUs of a node up to which its patterns are listed: 231 of them."""


def cuts(gpus: int, largest: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every way to cut so many GPUs into pieces, the largest first."""
    if gpus == 0:
        yield ()
    for first in range(min(gpus, largest or gpus), 0, -1):
        for rest in cuts(gpus - first, first):
            yield (first, *rest)


def limit(seating: Seating) -> float:
    """Return a bound on the total of any plan.

    The bound is infinite where the program is too large or has no answer.
    """
    table, packing = seating.table, seating.packing
    rooms = Counter(np.maximum(packing.free + packing.movable, 0).tolist())
    if table.value.size > MOST_OPTIONS or max(rooms, default=0) > LARGEST:
        return np.inf
    fixed = sum(seating.utility(j) for j, pinned in enumerate(seating.pinned) if pinned)
    own = np.flatnonzero(~table.pinned[table.owner])
    if own.size == 0:
        return float(fixed)
    worth, job = seating.worth[own], np.unique(table.owner[own], return_inverse=True)[1].ravel()
    best = np.full(int(job.max()) + 1, -np.inf)
    np.maximum.at(best, job, worth)
    loss = best[job] - worth
    scale = max(float(loss.max()), 1e-300)
    pieces = _pieces(table.nodes[own], table.per_node[own], max(rooms))
    limits, ceilings = _ceilings(seating, own)
    prices = _prices(loss / scale, job, np.concatenate([pieces, limits]), ceilings, rooms)
    if prices is None:
        return np.inf
    prices = prices * scale
    net = np.full(best.size, -np.inf)
    np.maximum.at(net, job, worth - prices @ np.concatenate([pieces, limits]))
    nodes = sum(many * top for many, top in zip(rooms.values(), _best_cuts(prices, rooms), strict=True))
    return float(fixed + net.sum() + nodes + prices[pieces.shape[0] :] @ ceilings)


def _pieces(nodes: Ints, per_node: Ints, largest: int) -> Floats:
    """Return [sizes, O]: the pieces of each size that each option asks for.

    Sizes go up from one GPU.
    """
    size = np.arange(1, max(largest, int(per_node.max(initial=0))) + 1)
    return np.where(per_node[None, :] == size[:, None], nodes[None, :], 0).astype(np.float64)


def _ceilings(seating: Seating, own: Ints) -> tuple[Floats, Floats]:
    """Return the GPUs that count towards each ceiling, and what it allows.

    [groups, O]: the GPUs of each option in the group. [groups]: the GPUs that the ceiling still allows.
    """
    table = seating.table
    gpus, owner = table.gpus[own], table.owner[own]
    rows = [np.where(np.isin(owner, g.members), gpus, 0).astype(np.float64) for g in table.groups]
    left = [
        max(g.ceiling - sum(seating.gpus[seating.option[j]] for j in g.members if seating.pinned[j]), 0)
        for g in table.groups
    ]
    return np.array(rows).reshape(len(rows), own.size), np.array(left, dtype=np.float64)


def _prices(cost: Floats, job: Ints, asked: Floats, ceilings: Floats, rooms: Counter[int]) -> Floats | None:
    """Return [sizes + groups]: the relaxation's price per piece and ceiling.

    The price of a size is the worth of one piece; the price of a ceiling is the worth of one GPU under it.
    """
    sizes = asked.shape[0] - ceilings.size
    patterns = [(room, Counter(cut)) for room in rooms for cut in cuts(room)]
    cut_into = np.zeros((asked.shape[0], len(patterns)))
    number = {room: i for i, room in enumerate(rooms)}
    of_room = np.zeros((len(rooms), cost.size + len(patterns)))
    for column, (room, cut) in enumerate(patterns):
        for size, many in cut.items():
            cut_into[size - 1, column] = -many
        of_room[number[room], cost.size + column] = 1.0
    one = csr_array((np.ones(cost.size), (job, np.arange(cost.size))), shape=(int(job.max()) + 1, cost.size))
    found = linprog(
        np.append(cost, np.zeros(len(patterns))),
        A_ub=csr_array(np.concatenate([np.concatenate([asked, cut_into], axis=1), of_room])),
        b_ub=np.concatenate([np.zeros(sizes), ceilings, np.array(list(rooms.values()), dtype=np.float64)]),
        A_eq=hstack([one, csr_array((one.shape[0], len(patterns)))]),
        b_eq=np.ones(one.shape[0]),
        bounds=(0, None),
    )
    if found.x is None:
        return None
    return np.maximum(-np.asarray(found.ineqlin.marginals[: asked.shape[0]], dtype=np.float64), 0.0)


def _best_cuts(prices: Floats, rooms: Counter[int]) -> list[float]:
    """Return the most that a node of each room is worth, cut the best way."""
    best = [0.0]
    for room in range(1, max(rooms) + 1):
        best.append(max(best[room - size] + float(prices[size - 1]) for size in range(1, room + 1)))
    return [best[room] for room in rooms]
