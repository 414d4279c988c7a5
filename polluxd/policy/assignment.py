"""Assign jobs to nodes with one integer program (HiGHS).

    x[o, n] = 1 if a job takes option o with its part on node n; an option over several nodes takes that many at once

Small, full clusters need the program, because the solver of the counts (GPUs per job) ignores how nodes divide them. It
finds counts there that do not fit onto the nodes. The policy runs the program only if a plan lies below the bound of
its counts, and the program is small. A limit on branch-and-bound nodes bounds its work, so that a replay is exact.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp

from polluxd.policy.domains import NOWHERE, Seat, classes
from polluxd.policy.integer import EQUAL
from polluxd.policy.owners import NO_CEILING
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating
from polluxd.policy.shapes import ONE_RACK, OVER_RACKS, Shape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

MOST_PARTS = 1_500
"""Parts of placements (variables) up to which the program is tried."""
FEW_PARTS = 300
"""The limit after node patterns were tried: they usually find the best plan already, in a third of the time."""
NODES, SECONDS = 300, 10.0
_GAP = 1e-5
"""Relative distance to its bound at which the program ends."""


class _Part(NamedTuple):
    """A variable: an option of a job as a whole, or its part on one node.

    `nodes`: the node of the part. It is None for the whole of an option over several nodes: its parts are separate
    variables, on nodes of one class, and of one rack if the shape asks for one rack. It holds all nodes of the job if
    the job stays.
    """

    job: int
    option: int
    nodes: tuple[int, ...]
    whole: int
    """The variable of the option as a whole; of itself for an option on one node or on none."""
    value: float


def improve(seating: Seating, *, after_patterns: bool = False) -> float:
    """Take the program's plan where it is better; return a bound on the total.

    The bound is infinite where the program is too large or found none.
    """
    parts = _parts(seating, min(FEW_PARTS, MOST_PARTS) if after_patterns else MOST_PARTS)
    if parts is None:
        return np.inf
    found, bound = _solve(seating, parts)
    if found is not None:
        _take(seating, parts, found)
    return bound


def limit(seating: Seating) -> float:
    """Return a bound on the total of any plan, without changing the seating.

    The bound is infinite where the program found none.
    """
    parts = _parts(seating, MOST_PARTS)
    return np.inf if parts is None else _solve(seating, parts)[1]


def _solve(seating: Seating, parts: list[_Part]) -> tuple[Floats | None, float]:
    """Return the program's solution, if it found one, and its bound."""
    wholes = [i for i, part in enumerate(parts) if part.whole == i]
    value = np.array([part.value for part in parts])
    fixed = sum(seating.utility(j) for j, pinned in enumerate(seating.pinned) if pinned)
    scale = max(float(np.abs(value).max()), 1e-300)
    found = milp(
        -value / scale,
        integrality=np.ones(value.size),
        bounds=Bounds(0, 1),
        constraints=_constraints(seating, parts, wholes),
        options={"node_limit": NODES, "time_limit": SECONDS, "mip_rel_gap": _GAP},
    )
    if found.mip_dual_bound is None or not np.isfinite(found.mip_dual_bound):
        return found.x, np.inf
    return found.x, float((EQUAL - found.mip_dual_bound) * scale + fixed)


def _parts(seating: Seating, most: int) -> list[_Part] | None:
    """List all variables; None if more than `most`, or nothing to decide."""
    packing, table = seating.packing, seating.table
    room = packing.free + packing.movable
    kinds = [np.array(numbers) for numbers in classes(packing.nodes).values()]
    parts: list[_Part] = []
    if len(table.jobs) - sum(seating.pinned) > most:
        return None
    for j in range(len(table.jobs)):
        if seating.pinned[j]:
            continue
        home, held = packing.home[j]
        for o in seating.options(j):
            if len(parts) > most:
                return None
            shape = table.shape(o)
            if shape.nodes == 0:
                value = (seating.stay if packing.home[j] == NOWHERE else seating.move)[o]
                parts.append(_Part(j, o, (), len(parts), value))
                continue
            open_to = packing.suited(j, shape) & (room >= shape.per_node)
            if seating.kept[o] and held == shape.per_node and open_to[list(home)].all():
                parts.append(_Part(j, o, home, len(parts), seating.stay[o]))
            lost = seating.value(o) - seating.move[o]
            if not seating.may_move_to(j, o) or (seating.slack is not None and lost > seating.slack[o]):
                continue
            if shape.nodes == 1:
                others = [
                    n for n in np.flatnonzero(open_to).tolist() if ((n,), shape.per_node) != packing.home[j]
                ]
                parts += [_Part(j, o, (n,), len(parts) + i, seating.move[o]) for i, n in enumerate(others)]
                continue
            for group in _groups(packing, j, shape, open_to, kinds):
                whole = len(parts)
                parts.append(_Part(j, o, (), whole, seating.move[o]))
                parts += [_Part(j, o, (n,), whole, 0.0) for n in group.tolist()]
    return parts if parts and len(parts) <= most else None


def _groups(packing: Packing, j: int, shape: Shape, open_to: Bools, kinds: list[Ints]) -> Iterator[Ints]:
    """Divide the nodes that are open into groups; an option over several lies within one."""
    for numbers in kinds:
        size, inside = packing.nodes[int(numbers[0])].gpus, numbers[open_to[numbers]]
        if shape.per_node == size or (packing.partial and shape.per_node < size):
            yield from (group for group in _within(packing, j, shape, inside) if group.size >= shape.nodes)


def _within(packing: Packing, j: int, shape: Shape, inside: Ints) -> list[Ints]:
    if packing.jobs[j].contiguous:
        return [np.array(run) for run in packing.runs(shape, inside)]
    rack = packing.rack[inside]
    return [inside[rack == r] for r in np.unique(rack)] if shape.racks == ONE_RACK else [inside]


def _constraints(seating: Seating, parts: list[_Part], wholes: list[int]) -> list[LinearConstraint]:
    """Build the rows of the program.

    Each job takes one option with all of its parts. Each node keeps within its GPUs, CPUs and memory, and holds at most
    one job that spans nodes. Each group keeps within its ceiling.
    """
    packing, table = seating.packing, seating.table
    room = packing.free + packing.movable
    cpus, memory, spans = _left_by_pinned(seating)
    count, nodes = len(parts), len(packing.nodes)
    one, gpus_on = np.zeros((len(table.jobs), count)), np.zeros((nodes, count))
    cpus_on, memory_on, spans_on = (np.zeros((nodes, count)) for _ in range(3))
    divided = [i for i in wholes if table.nodes[parts[i].option] > 1 and not parts[i].nodes]
    several = {i: row for row, i in enumerate(divided)}
    together, held = np.zeros((len(several), count)), np.zeros((len(table.groups), count))
    members = [frozenset(group.members) for group in table.groups]
    for i, part in enumerate(parts):
        per_node = int(table.per_node[part.option])
        if part.whole == i:
            one[part.job, i] = 1
            for g, own in enumerate(members):
                held[g, i] = seating.gpus[part.option] if part.job in own else 0
        for n in part.nodes:
            gpus_on[n, i] = per_node
            cpus_on[n, i] = packing.cpus_on(part.job, n, per_node)
            memory_on[n, i] = per_node * packing.memory_per_gpu[part.job]
            spans_on[n, i] = table.nodes[part.option] > 1
        if i in several:
            together[several[i], i] = -int(table.nodes[part.option])
        elif part.whole in several:
            together[several[part.whole], i] = 1
    spread = _spread(seating, parts)
    free = [float(not pinned) for pinned in seating.pinned]
    ceilings = [
        max(group.ceiling - sum(seating.gpus[seating.option[j]] for j in own if seating.pinned[j]), 0)
        if group.ceiling < NO_CEILING
        else np.inf
        for group, own in zip(table.groups, members, strict=True)
    ]
    rows = [
        (one, free, free),
        (gpus_on, np.full(nodes, -np.inf), np.maximum(room, 0)),
        (cpus_on, np.full(nodes, -np.inf), np.maximum(cpus, 0)),
        (spans_on, np.full(nodes, -np.inf), spans),
        *([(memory_on, np.full(nodes, -np.inf), np.maximum(memory, 0))] if memory_on.any() else []),
        (together, np.zeros(len(several)), np.zeros(len(several))),
        (held, np.full(len(table.groups), -np.inf), np.array(ceilings)),
        (spread, np.full(len(spread), -np.inf), np.zeros(len(spread))),
    ]
    return [LinearConstraint(matrix, low, high) for matrix, low, high in rows if matrix.size]


def _left_by_pinned(seating: Seating) -> tuple[Ints, Ints, Floats]:
    """Return what pinned jobs leave of each node: CPUs, memory, and whether a job that spans nodes may be there."""
    packing = seating.packing
    cpus, memory, spans = packing.cpus.copy(), packing.memory.copy(), np.ones(len(packing.nodes))
    for n, guests in enumerate(packing.guests):
        for j, gpus in guests.items():
            if not seating.pinned[j]:
                cpus[n] += packing.cpus_on(j, n, gpus)
                memory[n] += gpus * packing.memory_per_gpu[j]
            elif len(packing.seats[j][0]) > 1:
                spans[n] = 0
    return cpus, memory, spans


def _spread(seating: Seating, parts: list[_Part]) -> Floats:
    """Build rows that keep an option over racks from using one rack only.

    The program holds each row at 0 or below: no rack has every node of such an option.
    """
    packing, table = seating.packing, seating.table
    rows: dict[tuple[int, int], Floats] = {}
    for i, part in enumerate(parts):
        if part.whole != i and table.racks[part.option] == OVER_RACKS:
            row = rows.setdefault((part.whole, int(packing.rack[part.nodes[0]])), np.zeros(len(parts)))
            row[part.whole] = 1 - int(table.nodes[part.option])
            row[i] = 1
    return np.array(list(rows.values())).reshape(len(rows), len(parts))


def _take(seating: Seating, parts: list[_Part], x: Floats) -> None:
    """Seat the program's plan if it gains and costs no guarantee.

    Otherwise the present seating stays.
    """
    table = seating.table
    before, state, short = seating.total(), seating.state(), seating.shortfall()
    option = list(seating.option)
    nodes: list[list[int]] = [[] for _ in option]
    for part, share in zip(parts, x.tolist(), strict=True):
        if share > 0.5:
            option[part.job] = part.option
            nodes[part.job] += part.nodes
    seats: list[Seat] = [
        (tuple(sorted(own)), int(table.per_node[o])) if own else NOWHERE
        for own, o in zip(nodes, option, strict=True)
    ]
    seating.restore(list(zip(option, seats, strict=True)))
    if seating.total() <= before + 1e-9 * abs(before) or seating.shortfall() > short:
        seating.restore(state)
