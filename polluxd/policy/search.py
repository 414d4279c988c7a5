"""Improve a packed plan by local search.

A step lifts one job to a better option. The jobs in its way move, shrink or lose their GPUs. Every step taken raises
the total utility, so the search ends. A count of attempts bounds the work, not a clock, so a replay takes the same
steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from polluxd.policy.layout import NOWHERE, Seat
from polluxd.policy.placement import Seating
from polluxd.policy.shapes import ANYWHERE, ONE_RACK, Shape

ATTEMPTS = 400
"""Attempts whatever the number of jobs; see `PER_JOB`."""
PER_JOB = 0.5
PATIENCE = 100
"""Attempts without a gain after which the search ends."""
CANDIDATES = 4
"""Nodes, or sets of nodes, tried per option."""
OPTIONS = 3
"""Better options per job for which room is made."""
_NOISE = 1e-12


class _Way(NamedTuple):
    """Making room: who leaves, and the seat that is then taken."""

    cost: float
    victims: list[int]
    seat: Seat


def improve(seating: Seating, bound: float, tolerance: float) -> int:
    """Search until the total is near the bound or nothing helps.

    Near is within `tolerance`. Returns the number of attempts made.
    """
    table = seating.table
    jobs = len(table.jobs)
    limit, work, gained_at = int(ATTEMPTS + PER_JOB * jobs), 0, 0
    if jobs == 0:
        return 0
    best = np.maximum.reduceat(seating.worth, table.start[:-1])
    total = seating.total()
    better = True
    while better and work < limit and total < bound - tolerance:
        better = False
        smallest = max(_NOISE * abs(bound), tolerance / max(jobs, 1) * 1e-2)
        now = np.array([seating.utility(j) for j in range(jobs)])
        wish = np.where(table.pinned, 0.0, best - now)
        # Jobs that hold less than the counts gave them come first: the other jobs may keep the GPUs that they wish for.
        lack = np.maximum(seating.worth[seating.meant] - now, 0.0)
        order = np.lexsort((-wish, -lack))
        order = order[wish[order] > smallest]
        for j, gap in zip(order.tolist(), wish[order].tolist(), strict=True):
            if work >= min(limit, gained_at + PATIENCE) or total >= bound - tolerance:
                break
            gained, tries = _raise(seating, j, smallest)
            work += tries
            gained_at = work if gained > 0 else gained_at
            total += gained
            better |= gained > 0 and gap > 0
    seating.packing.forget()
    return work


def _raise(seating: Seating, j: int, smallest: float) -> tuple[float, int]:
    """Try the job's better options; return the gain and the attempts made.

    Every option is tried in the room as it is, then a few by making room.
    """
    now = seating.utility(j)
    wanted = [o for o in seating.ranked(j) if seating.value(o) > now + smallest]
    gained, tries = _in_room(seating, j, wanted, smallest)
    if gained > 0:
        return gained, tries
    for option in [*wanted[:OPTIONS], *_least(seating, j, wanted)]:
        for way in ways(seating, j, seating.table.shape(option)):
            if way.cost > seating.value(option) - now:
                continue
            tries += 1
            gained = _attempt(seating, j, option, way.victims, way.seat, smallest)
            if gained > 0:
                return gained, tries
    return 0.0, tries


def _in_room(seating: Seating, j: int, wanted: list[int], smallest: float) -> tuple[float, int]:
    """Seat the job at the first of these options that has room and gains.

    Nobody else moves. Returns the gain, or 0, and the options tried.
    """
    packing = seating.packing
    mark, option, now, short = packing.mark(), seating.option[j], seating.utility(j), seating.shortfall()
    packing.put(j, NOWHERE)
    lifted, room = packing.mark(), packing.room(j)
    for tries, wish in enumerate(wanted, 1):
        found = seating.seat_for(j, wish) if seating.gpus[wish] <= room else None
        if found is None:
            continue
        seating.give(j, wish, found)
        gained = seating.utility(j) - now
        if gained > smallest and seating.shortfall() <= short:
            return gained, tries
        packing.roll_back(lifted)
    packing.roll_back(mark)
    seating.option[j] = option
    return 0.0, len(wanted)


def _least(seating: Seating, j: int, wanted: list[int]) -> list[int]:
    """Return options for which room is made beside the best ones wanted.

    These are the option that the counts meant for the job, and the smallest better one: a job left over needs others
    to give up one node, not ten. Where racks are told apart, counts promise more than racks can hold, so a job
    without GPUs tries several small options there.
    """
    rest = wanted[OPTIONS:]
    least = sorted(rest, key=lambda o: (seating.gpus[o], o))
    several = seating.by_rack and seating.packing.seats[j] == NOWHERE
    return list(
        dict.fromkeys([o for o in rest if o == seating.meant[j]] + least[: OPTIONS if several else 1])
    )


def _attempt(
    seating: Seating, j: int, option: int, victims: list[int], target: Seat | None, smallest: float
) -> float:
    """Seat the job at an option, and its victims where they fit best.

    The job and the victims are lifted first. Everything is undone unless the total rises and no guarantee suffers.
    Returns the gain, or 0.
    """
    packing = seating.packing
    mark = packing.mark()
    touched = [j, *victims]
    before, short = sum(seating.utility(i) for i in touched), seating.shortfall()
    options = [seating.option[i] for i in touched]
    for i in touched:
        packing.put(i, NOWHERE)
    found = seating.seat_for(j, option) if target is None or seating.kept[option] else None
    if found is None and target is not None and seating.may_take(j, option) and packing.fits(j, target):
        found = target
    if found is not None:
        seating.give(j, option, found)
        for i in sorted(victims, key=lambda i: (-options[touched.index(i)], i)):
            seating.best_fit(i)
        gained = sum(seating.utility(i) for i in touched) - before
        if gained > smallest and seating.shortfall() <= short:
            return gained
    packing.roll_back(mark)
    for i, previous in zip(touched, options, strict=True):
        seating.option[i] = previous
    return 0.0


def ways(seating: Seating, j: int, shape: Shape) -> list[_Way]:
    """Return ways to make room for the shape, the cheapest first.

    The cost of a way is a lower bound on what its victims lose.
    """
    if shape.gpus == 0:
        return []
    packing = seating.packing
    own, own_per_node = packing.seats[j]
    free = packing.free.copy()
    for node in own:
        free[node] += own_per_node
    missing = np.maximum(shape.per_node - free, 0)
    possible = packing.suited(j, shape) & (free + packing.movable >= shape.per_node)
    numbers = np.flatnonzero(possible)
    # The fewest GPUs to clear first: others are not looked at.
    few = numbers[np.lexsort((numbers, missing[numbers]))][: max(3 * CANDIDATES, 2 * shape.nodes)].tolist()
    roomiest = np.lexsort((np.arange(free.size), -free))[:2].tolist()
    found = []
    for node in few:
        elsewhere = max((int(free[n]) for n in roomiest if n != node), default=0)
        found += _clear(seating, j, node, shape, (int(free[node]), elsewhere), alone=shape.nodes == 1)
    found.sort(key=lambda w: (w.cost, w.seat, w.victims))
    if shape.nodes == 1:
        return found[:CANDIDATES]
    return _together(seating, shape, found)


def _clear(
    seating: Seating, j: int, node: int, shape: Shape, room: tuple[int, int], *, alone: bool
) -> list[_Way]:
    """Return ways to clear the node for the shape's part of it.

    Either one guest leaves, or the smallest guests leave together. `room`: the GPUs free on the node, and the most
    that are free on any other node.
    """
    packing = seating.packing
    free, elsewhere = room
    guests = [(gpus, i) for i, gpus in packing.guests[node].items() if i != j]
    seat: Seat = ((node,), shape.per_node)
    if alone and free >= shape.per_node:
        return []
    out: list[int] = []
    if not alone:
        spanning = [i for _, i in guests if len(packing.seats[i][0]) > 1]
        if any(seating.pinned[i] for i in spanning):
            return []
        out = spanning
        free += sum(packing.guests[node][i] for i in out)
    ways: list[_Way] = []
    movable = sorted((gpus, i) for gpus, i in guests if not seating.pinned[i] and i not in out)
    if alone:
        ways += [
            _Way(_least_loss(seating, i, max(elsewhere, free + gpus - shape.per_node)), [i], seat)
            for gpus, i in movable
            if free + gpus >= shape.per_node
        ]
    for gpus, i in movable:
        if free >= shape.per_node:
            break
        out = [*out, i]
        free += gpus
    if free >= shape.per_node and (len(out) > 1 or not alone):
        elsewhere = max(elsewhere, free - shape.per_node)
        ways.append(_Way(sum(_least_loss(seating, i, elsewhere) for i in out), sorted(out), seat))
    return ways


def _least_loss(seating: Seating, i: int, room: int | None = None) -> float:
    """Return the least utility that a job loses by leaving its seat.

    The job moves at the same count, which costs nothing more if the plan moves it already. A job on one node can do
    so only if some node has enough GPUs free (`room`); otherwise it shrinks to what has room.
    """
    option, now = seating.option[i], seating.utility(i)
    if room is None or seating.gpus[option] <= room or len(seating.packing.seats[i][0]) > 1:
        return max(now - seating.move[option], 0.0)
    return max(now - seating.best_move(i, room), 0.0)


def _together(seating: Seating, shape: Shape, found: list[_Way]) -> list[_Way]:
    """Combine ways on single nodes into ways for a shape of several nodes.

    Each class of nodes offers those that are cheapest to clear. A victim that spans nodes counts once. Where the
    shape asks for one rack, the nodes lie in one. Where it asks for several racks and the nodes lie in one, the last
    node gives way to the cheapest node of another rack.
    """
    packing = seating.packing
    by_class: dict[tuple[str, int, int], list[_Way]] = {}
    for way in found:
        node = packing.nodes[way.seat[0][0]]
        if node.gpus == shape.per_node or (packing.partial and node.gpus > shape.per_node):
            rack = int(packing.rack[way.seat[0][0]]) if shape.racks == ONE_RACK else -1
            by_class.setdefault((node.gpu_type, node.gpus, rack), []).append(way)
    sets: list[_Way] = []
    for members in by_class.values():
        for first in range(min(len(members) - shape.nodes + 1, CANDIDATES)):
            picked = members[first : first + shape.nodes]
            if shape.racks != ANYWHERE and not packing.lies_in([w.seat[0][0] for w in picked], shape.racks):
                away = packing.rack[picked[0].seat[0][0]]
                other = next((w for w in members if packing.rack[w.seat[0][0]] != away), None)
                if other is None:
                    continue
                picked = [*picked[:-1], other]
            victims = sorted({i for way in picked for i in way.victims})
            numbers = tuple(sorted(way.seat[0][0] for way in picked))
            cost = sum(_least_loss(seating, i) for i in victims)
            sets.append(_Way(cost, victims, (numbers, shape.per_node)))
    return sorted(sets, key=lambda w: (w.cost, w.seat))
