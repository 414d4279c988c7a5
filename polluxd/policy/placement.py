"""From counts to nodes, and the search that wins back what packing lost.

Jobs whose shape stays keep their nodes. The others are placed largest first. Where a count cannot be placed, or
placing it leaves something to gain, a local search lifts one job to a better option, if need be by moving or
shrinking those in its way; every step raises the total utility, so the search ends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from polluxd.policy.menu import Menu
from polluxd.policy.packing import NOWHERE, Packing, Seat
from polluxd.policy.shapes import Shape

Ints = NDArray[np.int64]

WORK_PER_JOB = 30
"""Attempts of the local search per job: a bound on work, not on time, so that a replay is exact."""
_ENOUGH = 1e-9  # relative gain below which a step is noise


class Seating:
    """A packing with the option that each job has in it."""

    def __init__(self, menu: Menu, packing: Packing) -> None:
        self.menu = menu
        self.packing = packing
        self.option = menu.start[:-1].copy()
        self._none = menu.start[:-1]
        self._ranked: dict[int, list[int]] = {}

    def utility(self, j: int) -> float:
        return self.worth(j, int(self.option[j]), moved=self.packing.moved(j))

    def worth(self, j: int, option: int, *, moved: bool) -> float:
        return float((self.menu.move if moved else self.menu.stay)[option])

    def total(self) -> float:
        return float(sum(self.utility(j) for j in range(len(self.menu.jobs))))

    def pin(self) -> None:
        """Seat the pinned jobs where they are, whatever the state of their nodes."""
        for j in np.flatnonzero(self.menu.pinned).tolist():
            self.packing.put(j, self.packing.home[j])

    def ranked(self, j: int) -> list[int]:
        """The job's options from best to worst (as the count solver values them); ties: fewer GPUs first."""
        if j not in self._ranked:
            self._ranked[j] = sorted(
                self.menu.options(j), key=lambda o: (-self.menu.value[o], self.menu.gpus[o], o)
            )
        return self._ranked[j]

    def seat_for(self, j: int, option: int) -> Seat | None:
        """A seat for this option with the present room; its own when it can stay."""
        if self.menu.gpus[option] == 0:
            return NOWHERE
        if self.menu.kept[option] and self.packing.can_stay(j):
            return self.packing.home[j]
        if not self.may_move_to(j, option):
            return None
        return self.packing.find(j, self.menu.shape(option))

    def may_move_to(self, j: int, option: int) -> bool:
        """Whether the job's own limits allow the option elsewhere too: what it holds may be outside of them."""
        spec, gpus = self.menu.jobs[j].spec, int(self.menu.gpus[option])
        return spec.min_gpus <= gpus and (spec.max_gpus is None or gpus <= spec.max_gpus)

    def give(self, j: int, option: int, seat: Seat) -> None:
        self.packing.put(j, seat)
        self.option[j] = option

    def fill(self, chosen: Ints) -> None:
        """Seat every job's chosen option; one that finds no room gets the best of its others that does.

        Jobs whose shape stays keep their nodes; of the rest, the largest come first.
        """
        menu, packing = self.menu, self.packing
        others: list[int] = []
        for j in np.flatnonzero(~menu.pinned).tolist():
            option = int(chosen[j])
            if menu.kept[option] and menu.gpus[option] and packing.can_stay(j):
                self.give(j, option, packing.home[j])
            elif menu.gpus[option]:
                others.append(j)
        others.sort(key=lambda j: (-menu.nodes[chosen[j]], -menu.per_node[chosen[j]], j))
        lost: list[int] = []
        for j in others:
            found = self.seat_for(j, int(chosen[j]))
            if found is None:
                lost.append(j)
            else:
                self.give(j, int(chosen[j]), found)
        for j in sorted(lost, key=lambda j: (-menu.value[chosen[j]], j)):
            _best_fit(self, j)


def _best_fit(seating: Seating, j: int) -> None:
    """Give the job, which sits nowhere, the best option that has room."""
    for option in seating.ranked(j):
        found = seating.seat_for(j, option)
        if found is not None:
            seating.give(j, option, found)
            return


def improve(seating: Seating, bound: float) -> int:
    """Local search from a seating, up to the bound on total utility; returns the number of attempts made."""
    menu = seating.menu
    work, limit = 0, WORK_PER_JOB * len(menu.jobs) + 100
    tolerance = _ENOUGH * max(abs(bound), 1e-12)
    total, better = seating.total(), True
    while better and work < limit and total < bound - tolerance:
        better = False
        best = np.maximum.reduceat(menu.value, menu.start[:-1])
        wish = [(float(best[j]) - seating.utility(j), j) for j in range(len(menu.jobs))]
        for gap, j in sorted(wish, key=lambda w: (-w[0], w[1])):
            if gap <= tolerance or work >= limit or menu.pinned[j]:
                continue
            gained, tries = _raise_job(seating, j, tolerance, limit - work)
            work += tries
            better |= gained > 0
            total += gained
    return work


def _raise_job(seating: Seating, j: int, tolerance: float, limit: int) -> tuple[float, int]:
    """Try the job's better options, best first: with room as it is, then by making room. Gain and attempts."""
    menu, now, tries = seating.menu, seating.utility(j), 0
    wanted = [o for o in seating.ranked(j) if menu.value[o] > now + tolerance]
    for option in wanted:
        tries += 1
        gained = _attempt(seating, j, option, [], None, tolerance)
        if gained > 0:
            return gained, tries
    for option in wanted:
        for victims, target in _in_the_way(seating, j, menu.shape(option)):
            tries += 1
            gained = _attempt(seating, j, option, victims, target, tolerance)
            if gained > 0 or tries >= limit:
                return gained, tries
    return 0.0, tries


def _attempt(
    seating: Seating, j: int, option: int, victims: list[int], target: Seat | None, tolerance: float
) -> float:
    """Lift job and victims, seat the job, give each victim the best that fits; undone unless the total rises."""
    packing, mark = seating.packing, seating.packing.mark()
    touched = [j, *victims]
    before = sum(seating.utility(i) for i in touched)
    options = [int(seating.option[i]) for i in touched]
    for i in touched:
        packing.put(i, NOWHERE)
    found = seating.seat_for(j, option)
    if found is None and target is not None and seating.may_move_to(j, option) and packing.fits(j, target):
        found = target
    if found is not None:
        seating.give(j, option, found)
        for i in victims:
            _best_fit(seating, i)
        gained = sum(seating.utility(i) for i in touched) - before
        if gained > tolerance:
            return gained
    packing.roll_back(mark)
    for i, previous in zip(touched, options, strict=True):
        seating.option[i] = previous
    return 0.0


_CANDIDATES = 6  # nodes, or sets of nodes, tried per option


def _in_the_way(seating: Seating, j: int, shape: Shape) -> list[tuple[list[int], Seat | None]]:
    """Sets of jobs whose leaving would make room for the shape, the cheapest first, and the seat then taken."""
    packing, menu = seating.packing, seating.menu
    if shape.gpus == 0:
        return []
    own, own_per_node = packing.seats[j]
    allowed = packing.allowed(j)
    costs: list[tuple[float, int, list[int]]] = []
    for node in np.flatnonzero(allowed).tolist():
        free = int(packing.free[node]) + (own_per_node if node in own else 0)
        guests = [i for i in packing.guests[node] if i != j]
        if shape.nodes > 1 and any(menu.pinned[i] and len(packing.seats[i][0]) > 1 for i in guests):
            continue
        movable = sorted(
            (i for i in guests if not menu.pinned[i]), key=lambda i: (packing.guests[node][i], i)
        )
        must = [i for i in movable if shape.nodes > 1 and len(packing.seats[i][0]) > 1]
        free += sum(packing.guests[node][i] for i in must)
        if shape.nodes == 1:
            for i in movable:
                if free < shape.per_node <= free + packing.guests[node][i]:
                    costs.append((_loss(seating, [i]), node, [i]))
        out = list(must)
        for i in movable:
            if free >= shape.per_node:
                break
            if i not in must:
                out.append(i)
                free += packing.guests[node][i]
        if free >= shape.per_node and (len(out) > 1 or shape.nodes > 1):
            costs.append((_loss(seating, out), node, out))
    costs.sort(key=lambda c: (c[0], c[1], c[2]))
    if shape.nodes == 1:
        return [(out, ((node,), shape.per_node)) for _, node, out in costs[:_CANDIDATES]]
    return _sets_of_nodes(seating, shape, costs)


def _sets_of_nodes(
    seating: Seating, shape: Shape, costs: list[tuple[float, int, list[int]]]
) -> list[tuple[list[int], Seat | None]]:
    """For a multi-node shape: per class, the nodes that are cheapest to clear, counting each victim once."""
    packing = seating.packing
    by_class: dict[tuple[str, int], list[tuple[float, int, list[int]]]] = {}
    for cost in costs:
        node = packing.nodes[cost[1]]
        if node.gpus == shape.per_node or (packing.partial and node.gpus > shape.per_node):
            by_class.setdefault((node.gpu_type, node.gpus), []).append(cost)
    sets: list[tuple[list[int], Seat | None]] = []
    for members in by_class.values():
        for first in range(min(len(members) - shape.nodes + 1, _CANDIDATES // 2)):
            picked = members[first : first + shape.nodes]
            victims = sorted({i for _, _, out in picked for i in out})
            numbers = tuple(sorted(node for _, node, _ in picked))
            sets.append((victims, (numbers, shape.per_node)))
    return sets


def _loss(seating: Seating, victims: list[int]) -> float:
    """Utility that the victims have now over having nothing: at most this much is lost."""
    menu = seating.menu
    return float(sum(seating.utility(i) - menu.stay[menu.start[i]] for i in victims))
