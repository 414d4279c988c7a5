"""Divide two nodes among their jobs exactly: the second local search.

What one job's step cannot do, since another's has to come first, two nodes' best division can: a small dynamic
program over the jobs, whose state is the GPUs used on either node. Jobs that wait take part too.
"""

from __future__ import annotations

from functools import lru_cache
from heapq import nsmallest
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from polluxd.policy.layout import NOWHERE, Seat
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WAITING = 2
"""Most jobs without GPUs that take part in each division: the jobs with most at stake."""
MOST_STATES = 400
"""Nodes of up to 19 GPUs; larger ones are left to the other search."""
PATIENCE = 60
"""Divisions without a gain after which the search ends."""
PARTNERS = 15
"""Nodes that each node is tried with, the most promising first."""


class _Choice(NamedTuple):
    option: int
    seat: Seat
    value: float
    used: tuple[int, int]


def improve(seating: Seating, aim: float, tolerance: float, limit: int) -> int:
    """Divide pairs of nodes while that gains; return how many were tried."""
    table, packing = seating.table, seating.packing
    if not table.jobs or len(packing.nodes) == 0:
        return 0
    best = np.maximum.reduceat(seating.worth, table.start[:-1]).tolist()
    smallest = max(1e-12 * abs(aim), tolerance * 1e-3)
    work, better, total = 0, True, seating.total()
    waiting = _most_at_stake(seating, best, smallest)
    settled: dict[tuple[int, int], int] = {}
    version = [0] * len(packing.nodes)
    while better and work < limit and total < aim - tolerance:
        better = False
        for a, b in _pairs(seating, best):
            if work >= min(limit, max(version) + PATIENCE) or total >= aim - tolerance:
                break
            seen = max(version[a], version[b])
            if settled.get((a, b), -1) >= seen:
                continue
            work += 1
            gained = _divide(seating, a, b, waiting, best, smallest)
            settled[(a, b)] = seen
            if gained > 0:
                total += gained
                waiting = _most_at_stake(seating, best, smallest)
                better = True
                version[a] = version[b] = work
                settled[(a, b)] = work
    packing.forget()
    return work


def _pairs(seating: Seating, best: list[float]) -> list[tuple[int, int]]:
    """Return pairs of nodes; the nodes that jobs wish for most come first.

    Nodes where no job could do better are partners only.
    """
    packing = seating.packing
    wish = np.zeros(len(packing.nodes))
    for j, gap in enumerate(best):
        for n in packing.seats[j][0]:
            wish[n] += gap - seating.utility(j)
    waiting = any(seat == NOWHERE and not seating.pinned[j] for j, seat in enumerate(packing.seats))
    order = np.lexsort((np.arange(wish.size), -packing.free, -wish)).tolist()
    order = [n for n in order if packing.nodes[n].capacity > 0]
    active = [n for n in order if wish[n] > 0 or waiting]
    # In small clusters every active node is tried with every other; in large ones with the most promising.
    partners = order[: PARTNERS + 1]
    found = {(min(a, b), max(a, b)): None for a in active for b in partners if a != b}
    return list(found)


def _most_at_stake(seating: Seating, best: list[float], smallest: float) -> list[int]:
    """Return the jobs without GPUs that take part in each division."""
    gaps = [
        (seating.utility(j) - best[j], j)
        for j, seat in enumerate(seating.packing.seats)
        if seat == NOWHERE and not seating.pinned[j]
    ]
    return [j for gap, j in nsmallest(WAITING, gaps) if -gap > smallest]


def _divide(
    seating: Seating, a: int, b: int, waiting: list[int], best: list[float], smallest: float
) -> float:
    """Take the best division of nodes `a` and `b`; return its gain."""
    packing = seating.packing
    pair = {a, b}
    inside = sorted(
        j
        for j in {*packing.guests[a], *packing.guests[b]}
        if not seating.pinned[j] and pair.issuperset(packing.seats[j][0])
    )
    inside += waiting
    if not inside or sum(best[j] - seating.utility(j) for j in inside) <= smallest:
        return 0.0
    room = tuple(
        int(packing.free[n]) + sum(packing.guests[n][j] for j in inside if j in packing.guests[n])
        for n in (a, b)
    )
    if min(room) < 0 or (room[0] + 1) * (room[1] + 1) > MOST_STATES:
        return 0.0
    before = sum(seating.utility(j) for j in inside)
    if _at_most(seating, inside, pair, room) - before <= 0.5 * smallest:
        return 0.0
    tables = [_choices(seating, j, a, b, room) for j in inside]
    picked = _solve(tables, room)
    if sum(c.value for c in picked) - before <= smallest:
        return 0.0
    return _take(seating, inside, picked, before, smallest)


def _at_most(seating: Seating, inside: list[int], pair: set[int], room: tuple[int, ...]) -> float:
    """Return a total that no division exceeds: both nodes' GPUs as one pool."""
    reach, pool = (max(room), min(room)), range(sum(room) + 1)
    best = [0.0] * len(pool)
    for j in inside:
        steps = seating.steps_on_two_nodes(j, reach, pair.issuperset(seating.packing.home[j][0]))
        best = [max([best[left - gpus] + worth for gpus, worth in steps if gpus <= left]) for left in pool]
    return best[-1]


def _choices(seating: Seating, j: int, a: int, b: int, room: tuple[int, ...]) -> list[_Choice]:
    """Return what the job could have on the two nodes.

    Nothing, GPUs of one node, or equal parts of both.
    """
    packing, table = seating.packing, seating.table
    home, cpus, stay, move = packing.home[j], table.jobs[j].spec.cpus_per_gpu, seating.stay, seating.move
    allowed, pair = packing.allowed(j), (a, b)
    found: list[_Choice] = []
    for o, nodes, k in seating.on_two_nodes[j]:
        if nodes == 0:
            found.append(_Choice(o, NOWHERE, (stay if home == NOWHERE else move)[o], (0, 0)))
            continue
        fits = k <= room[0], k <= room[1]
        if not (any(fits) if nodes == 1 else all(fits)):
            continue
        if table.types:
            allowed = packing.suited(j, table.shape(o))
        seats: list[tuple[Seat, tuple[int, int]]] = []
        if nodes == 1:
            seats = [(((n,), k), (k, 0) if n == a else (0, k)) for n in pair if fits[n == b]]
        elif _spans(packing.nodes[a].gpus, packing.nodes[b].gpus, k, packing.partial):
            both = (a, b) if a < b else (b, a)
            seats = [((both, k), (k, k))] if packing.lies_in(both, int(table.racks[o])) else []
        for seat, used in seats:
            if not all(allowed[n] for n in seat[0]):
                continue
            at_home = seat == home
            if not at_home and not seating.may_move_to(j, o):
                continue
            # CPUs and spanning neighbours are checked when the division is carried out.
            if cpus * k > max(packing.nodes[n].cpus or 1 << 40 for n in seat[0]):
                continue
            found.append(_Choice(o, seat, (stay if at_home else move)[o], used))
    return found


def _spans(size_a: int, size_b: int, per_node: int, partial: bool) -> bool:
    return size_a == size_b and (per_node == size_a or (partial and per_node < size_a))


@lru_cache(maxsize=4096)
def _sources(room: tuple[int, ...], used: tuple[int, int]) -> Ints:
    """Return, for each state, the state before `used` more GPUs.

    A state is the GPUs used on either node; the last number means that there is none.
    """
    first, second = np.divmod(np.arange((room[0] + 1) * (room[1] + 1)), room[1] + 1)
    before = (first - used[0]) * (room[1] + 1) + second - used[1]
    return np.where((first >= used[0]) & (second >= used[1]), before, (room[0] + 1) * (room[1] + 1))


def _solve(tables: list[list[_Choice]], room: tuple[int, ...]) -> list[_Choice]:
    """One choice per job, of largest total value within the room."""
    states = (room[0] + 1) * (room[1] + 1)
    best = np.zeros(states)
    trail: list[tuple[Ints, Ints]] = []
    columns = np.arange(states)
    for choices in tables:
        sources = np.stack([_sources(room, c.used) for c in choices])
        values = np.array([c.value for c in choices])
        total = np.append(best, -np.inf)[sources] + values[:, None]
        which = np.argmax(total, axis=0)
        trail.append((which, sources[which, columns]))
        best = total[which, columns]
    state = int(np.argmax(best))
    picked: list[_Choice] = []
    for choices, (which, sources) in zip(reversed(tables), reversed(trail), strict=True):
        picked.append(choices[int(which[state])])
        state = int(sources[state])
    return picked[::-1]


def _take(
    seating: Seating, inside: list[int], picked: list[_Choice], before: float, smallest: float
) -> float:
    """Carry a division out; return the gain, or 0 where it is forbidden.

    CPUs, ceilings, guarantees or a spanning neighbour may forbid it.
    """
    packing = seating.packing
    mark, short = packing.mark(), seating.shortfall()
    options = [seating.option[j] for j in inside]
    for j in inside:
        packing.put(j, NOWHERE)
    fits = True
    for j, choice in zip(inside, picked, strict=True):
        if choice.seat != NOWHERE:
            fits &= packing.within_ceilings(j, seating.gpus[choice.option]) and packing.fits(j, choice.seat)
        if not fits:
            break
        seating.give(j, choice.option, choice.seat)
    gained = sum(seating.utility(j) for j in inside) - before if fits else 0.0
    if gained > smallest and seating.shortfall() <= short:
        return gained
    packing.roll_back(mark)
    for j, option in zip(inside, options, strict=True):
        seating.option[j] = option
    return 0.0
