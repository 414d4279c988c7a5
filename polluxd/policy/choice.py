"""Choose the solver of the counts.

Small problems are solved exactly, large ones by price, several GPU types by an integer program.

All solvers return a `Choice`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import counts, integer, objective, price
from polluxd.policy.domains import Domain
from polluxd.policy.option_table import OptionTable
from polluxd.policy.owners import Group, nested
from polluxd.policy.packing import Packing
from polluxd.policy.shapes import ONE_RACK

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_ROUNDING = 1e-9
MOST_VARIABLES = 6_000
"""Options, and options by rack, up to which racks are part of the integer program."""


class Choice(NamedTuple):
    """One option per job, placement aside."""

    chosen: Ints
    """[J]"""
    aim: float
    """The total utility if every option finds room: the search for a better plan stops at this value. If the solver did
    not prove its choice to be the best, `aim` is the bound."""
    bound: float
    """Upper bound on the sum of utilities."""
    solver: str
    reach: Floats | None = None
    """[O]: no plan that has the option has a larger total; None: not known."""
    plain_bound: float = np.inf
    """At powers where utilities order plans beyond the fitness: on the sum of what that adds up, or on the fitness
    itself under max-min."""


def choose(table: OptionTable, domain: Domain, packing: Packing, power: float) -> Choice:
    """Choose counts within capacity, ceilings, guarantees and partitions.

    Jobs that are seated already keep their GPUs.
    """
    gpus = np.where(table.pinned[table.owner], 0, table.gpus)
    held = [sum(int(table.gpus[table.start[j]]) for j in g.members if table.pinned[j]) for g in table.groups]
    limits = [g.less(h) for g, h in zip(table.groups, held, strict=True)]
    free = np.maximum(packing.free, 0)
    capacity = int(free.sum())
    rooms = domain.rooms(table.jobs)
    limits += [Group("room", jobs, 0, int(free[list(nodes)].sum())) for jobs, nodes in rooms]
    choice = _choose(table, packing, gpus, limits)
    if power > objective.GENTLE:
        return choice
    weight = table.weight[table.owner]
    x = table.rating * np.where(table.kept, 1.0, table.factor)
    if not np.isfinite(power):
        reached = (x + objective.FLOOR) / weight
        return choice._replace(
            plain_bound=objective.highest_worst(reached, gpus, table.start, capacity, limits)
        )
    value = objective.plain(x, weight, power)
    bound = price.solve(gpus, value, table.start, capacity, limits).bound
    return choice._replace(plain_bound=bound + _ROUNDING * abs(bound))


def _choose(table: OptionTable, packing: Packing, gpus: Ints, limits: list[Group]) -> Choice:
    capacity = int(np.maximum(packing.free, 0).sum())
    by_rack = bool(np.any(table.racks))
    if table.types or by_rack:
        racks = _racks(table, packing, gpus) if by_rack else None
        if table.types or racks is not None:
            return _by_program(table, packing, gpus, limits, racks)
    # Larger problems leave racks to the placement: if no rack has room, it places the option over several racks.
    priced = price.solve(gpus, table.value, table.start, capacity, limits)
    if priced.proven:
        return Choice(priced.chosen, priced.total, priced.bound, "dynamic program", priced.reach)
    if gpus.size * capacity <= price.EXACT_WORK and nested(limits):
        chosen, total = counts.solve(gpus, table.value, table.start, capacity, limits)
        return Choice(chosen, total, total, "dynamic program", priced.reach)
    aim = priced.total if nested(limits) else priced.bound
    return Choice(priced.chosen, aim, priced.bound, "price", priced.reach)


def _by_program(
    table: OptionTable,
    packing: Packing,
    gpus: Ints,
    limits: list[Group],
    racks: integer.Racks | None,
) -> Choice:
    """Solve counts per GPU type, and per rack if `racks` is given.

    The bound of a problem with all types merged into one is a valid bound, too.
    """
    free, pool = np.maximum(packing.free, 0), _pool_of_node(table, packing)
    capacity = [int(free[pool == k].sum()) for k in range(max(len(table.types), 1))]
    kind = table.kind if table.types else np.zeros_like(table.kind)
    pools = integer.Pools(np.where(gpus > 0, kind, -1), capacity, racks)
    found = integer.solve(gpus, table.value, table.start, pools, limits)
    return Choice(found.chosen, found.bound, found.bound, "integer program")


def _pool_of_node(table: OptionTable, packing: Packing) -> Ints:
    """Per node the number of its GPU type; 0 where types make no difference."""
    number = {kind: k for k, kind in enumerate(table.types)}
    return np.array(
        [number[n.gpu_type] if number and n.gpus > 0 else 0 for n in packing.nodes], dtype=np.int64
    )


def _racks(table: OptionTable, packing: Packing, gpus: Ints) -> integer.Racks | None:
    """Return the racks' GPUs and their nodes that are open to spanning jobs.

    None where there are too many.
    """
    spans = (gpus > 0) & (table.nodes > 1)
    within = spans & (table.racks == ONE_RACK)
    racks = int(packing.rack.max()) + 1
    free, pool = np.maximum(packing.free, 0), _pool_of_node(table, packing)
    sizes = np.array([n.gpus for n in packing.nodes], dtype=np.int64)
    alone = (packing.spanned == 0) & (free > 0) & (packing.partial | (free == sizes))
    found = np.zeros((2, int(pool.max()) + 1, racks), dtype=np.int64)
    np.add.at(found[0], (pool, packing.rack), free)
    np.add.at(found[1], (pool, packing.rack), alone)
    # One column stands for all racks with the same number of open nodes. The placement chooses among these racks.
    gathered = np.unique(found[1], axis=1, return_inverse=True)[1].ravel()
    kinds = int(gathered.max()) + 1
    if gpus.size + int(within.sum()) * kinds > MOST_VARIABLES:
        return None
    held = np.zeros((found.shape[1], kinds), dtype=np.int64)
    alone_in = np.zeros_like(held)
    np.add.at(held.T, gathered, found[0].T)
    alone_in[:, gathered] = found[1]
    return integer.Racks(
        within, np.where(spans, table.nodes, 0), held, alone_in, np.bincount(gathered, minlength=kinds)
    )
