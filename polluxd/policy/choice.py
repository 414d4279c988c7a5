"""Which solver decides the counts: exact while small, by price beyond, an integer program where GPU types differ.

All behind one answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.policy import counts, integer, objective, price
from polluxd.policy.ceilings import Group, nested
from polluxd.policy.domains import Domain
from polluxd.policy.menu import Menu
from polluxd.policy.packing import Packing

Ints = NDArray[np.int64]

_ROUNDING = 1e-9


class Choice(NamedTuple):
    """One option per job, placement aside."""

    chosen: Ints
    """[J]"""
    aim: float
    """The total utility if all of it is placed: the search stops there. The bound, where the solver is unsure."""
    bound: float
    """On the sum of utilities, what the starvation bound adds included."""
    fair_bound: float
    """On the sum of utilities without that: infinite where nothing better than `bound` is known."""
    solver: str
    plain_bound: float = np.inf
    """On the sum of what the fitness itself adds up, at powers where utilities order plans beyond it."""


def choose(menu: Menu, domain: Domain, packing: Packing, power: float) -> Choice:
    """Counts within capacity, ceilings, guarantees and the partitions' nodes, given the jobs seated already."""
    gpus = np.where(menu.pinned[menu.owner], 0, menu.gpus)
    held = [sum(int(menu.gpus[menu.start[j]]) for j in g.members if menu.pinned[j]) for g in menu.groups]
    limits = [g.less(h) for g, h in zip(menu.groups, held, strict=True)]
    free = np.maximum(packing.free, 0)
    capacity = int(free.sum())
    rooms = domain.rooms(menu.jobs)
    limits += [Group("room", jobs, 0, int(free[list(nodes)].sum())) for jobs, nodes in rooms]
    fair_bound = np.inf
    if np.any(menu.penalty):
        # Penalties swamp a relaxation's bound; without them it says what the objective alone allows.
        plain = menu.value + np.where(menu.gpus == 0, menu.penalty[menu.owner], 0.0)
        fair_bound = price.solve(gpus, plain, menu.start, capacity, limits).bound
    choice = _choose(menu, packing, gpus, limits, fair_bound)
    if power > objective.GENTLE or not np.isfinite(power):
        return choice
    weight = menu.weight[menu.owner]
    x = menu.speedup / menu.gpus_per_node * np.where(menu.kept, 1.0, menu.factor[menu.owner])
    value = objective.plain(x, weight, power)
    bound = price.solve(gpus, value, menu.start, capacity, limits).bound
    return choice._replace(plain_bound=bound + _ROUNDING * abs(bound))


def _choose(menu: Menu, packing: Packing, gpus: Ints, limits: list[Group], fair_bound: float) -> Choice:
    capacity = int(np.maximum(packing.free, 0).sum())
    if menu.types:
        return _by_type(menu, packing, gpus, limits, fair_bound)
    priced = price.solve(gpus, menu.value, menu.start, capacity, limits)
    if priced.proven:
        return Choice(priced.chosen, priced.total, priced.bound, fair_bound, "dynamic program")
    if gpus.size * capacity <= price.EXACT_WORK and nested(limits):
        chosen, total = counts.solve(gpus, menu.value, menu.start, capacity, limits)
        return Choice(chosen, total, total, fair_bound, "dynamic program")
    aim = priced.total if nested(limits) else priced.bound
    return Choice(priced.chosen, aim, priced.bound, fair_bound, "price")


def _by_type(menu: Menu, packing: Packing, gpus: Ints, limits: list[Group], fair_bound: float) -> Choice:
    """Counts per GPU type; a bound over all types as one is a bound too."""
    free = np.maximum(packing.free, 0)
    capacity = [
        int(sum(free[n] for n, node in enumerate(packing.nodes) if node.gpu_type == kind))
        for kind in menu.types
    ]
    pools = integer.Pools(np.where(gpus > 0, menu.kind, -1), capacity)
    found = integer.solve(gpus, menu.value, menu.start, pools, limits)
    return Choice(found.chosen, found.bound, found.bound, fair_bound, "integer program")
