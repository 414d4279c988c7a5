"""A bound that knows what nodes can hold together: counts alone promise that every GPU left over can be used.

Three GPUs of four given to one job leave one, which no job of two can use. Here every option asks for pieces, so many
GPUs on each of its nodes, and every node is cut into pieces by one pattern (Gilmore and Gomory, 1961, on cutting
stock). The linear relaxation gives a price per size of piece; what the options and the patterns are worth at any such
prices bounds every plan, so that no tolerance of the program's is part of the bound. Left out, which only loosens it:
which nodes a job may use, and that two jobs over several nodes share none.
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
    """A bound on the total of any plan; infinite where the program is too large or has no answer."""
    table, packing = seating.table, seating.packing
    rooms = Counter(np.maximum(packing.free + packing.movable, 0).tolist())
    if table.value.size > MOST_OPTIONS or max(rooms, default=0) > LARGEST:
        return np.inf
    value = np.where(table.kept, seating.stay, seating.move)
    fixed = sum(seating.utility(j) for j, pinned in enumerate(seating.pinned) if pinned)
    own = np.flatnonzero(~table.pinned[table.owner])
    if own.size == 0:
        return float(fixed)
    worth, job = value[own], np.unique(table.owner[own], return_inverse=True)[1].ravel()
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
    """[sizes, O]: pieces of each size, from one GPU up, that each option asks for."""
    size = np.arange(1, max(largest, int(per_node.max(initial=0))) + 1)
    return np.where(per_node[None, :] == size[:, None], nodes[None, :], 0).astype(np.float64)


def _ceilings(seating: Seating, own: Ints) -> tuple[Floats, Floats]:
    """[groups, O]: the GPUs of each option that count towards each ceiling; [groups]: GPUs that it still allows."""
    table = seating.table
    gpus, owner = table.gpus[own], table.owner[own]
    rows = [np.where(np.isin(owner, g.members), gpus, 0).astype(np.float64) for g in table.groups]
    left = [
        max(g.ceiling - sum(seating.gpus[seating.option[j]] for j in g.members if seating.pinned[j]), 0)
        for g in table.groups
    ]
    return np.array(rows).reshape(len(rows), own.size), np.array(left, dtype=np.float64)


def _prices(cost: Floats, job: Ints, asked: Floats, ceilings: Floats, rooms: Counter[int]) -> Floats | None:
    """[sizes + groups]: what a piece of each size, and a GPU under each ceiling, is worth in the relaxation."""
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
    """The most that a node of each room is worth, cut in the best way."""
    best = [0.0]
    for room in range(1, max(rooms) + 1):
        best.append(max(best[room - size] + float(prices[size - 1]) for size in range(1, room + 1)))
    return [best[room] for room in rooms]
