"""Place the chosen options on nodes.

Jobs whose shape does not change keep their nodes, if every other chosen option can then be placed. Otherwise all jobs
are placed again, the largest first. Small jobs then give way to larger ones where this costs least.

For Slurm, nodes of one kind differ: the job's batch script runs on one node, and companion jobs lend others. Jobs that
change their size keep the right ones (`leave_right_nodes`), and so change it within their allocations.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.model import Node, Placement
from polluxd.policy.domains import NOWHERE, Seat
from polluxd.policy.option_table import OptionTable
from polluxd.policy.packing import Packing
from polluxd.policy.shapes import OVER_RACKS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Seating:
    """A packing with the option that each job has in it."""

    def __init__(self, table: OptionTable, packing: Packing) -> None:
        self.table = table
        self.packing = packing
        self.option: list[int] = table.start[:-1].tolist()
        self.stay: list[float] = table.stay.tolist()
        self.move: list[float] = table.move.tolist()
        self.gpus: list[int] = table.gpus.tolist()
        self.worth: Floats = table.value
        """[O]: utility at best: a present shape stays in place."""
        self.slack: Floats | None = None
        """[O]: how far a plan with the option may exceed the present plan at most. Programs skip options below 0. None:
        not known, so they skip none."""
        self.kept: list[bool] = table.kept.tolist()
        self.pinned: list[bool] = table.pinned.tolist()
        self._ranked: dict[int, list[int]] = {}
        self.owed: list[int] = [0] * len(table.groups)
        """GPUs of each group's guarantee, as far as the counts use it."""
        for j in np.flatnonzero(table.pinned).tolist():
            # At their present placement, in any state of their nodes.
            packing.put(j, packing.home[j])

    def valued(self, stay: Floats, move: Floats) -> Seating:
        """Return the same seating, not a copy, under other utilities [O]."""
        other = copy.copy(self)
        other.stay, other.move, other._ranked, other.slack = stay.tolist(), move.tolist(), {}, None
        other.worth = np.where(self.table.kept, stay, move)
        return other

    def among(self, reach: Floats | None) -> Seating:
        """Return the same seating, not a copy, with fewer options to look at.

        `reach` [O]: no plan that has the option has a larger total. Programs leave out what reaches no more than the
        present plan.
        """
        if reach is None:
            return self
        other, total = copy.copy(self), self.total()
        other.slack = reach - total + 1e-9 * abs(total)
        for j, option in enumerate(self.option):
            other.slack[option] = max(other.slack[option], self.value(option) - self.utility(j))
        return other

    def options(self, j: int) -> Sequence[int]:
        """Return the job's options that a program has to consider."""
        own = self.table.options(j)
        return own if self.slack is None else [o for o in own if self.slack[o] >= 0]

    def utility(self, j: int) -> float:
        """What the job's present option is worth, given whether it moves for it."""
        return (self.move if self.packing.seats[j] != self.packing.home[j] else self.stay)[self.option[j]]

    def total(self) -> float:
        seats, stay, move = zip(self.packing.seats, self.packing.home, strict=True), self.stay, self.move
        return sum(
            [
                stay[o] if seat is home or seat == home else move[o]
                for o, (seat, home) in zip(self.option, seats, strict=True)
            ]
        )

    def value(self, option: int) -> float:
        """What the option is worth at best."""
        return (self.stay if self.kept[option] else self.move)[option]

    def ranked(self, j: int) -> list[int]:
        """Return the job's options from best to worst.

        Of equal options the one of fewer GPUs comes first.
        """
        if j not in self._ranked:
            self._ranked[j] = sorted(self.table.options(j), key=lambda o: (-self.value(o), self.gpus[o], o))
        return self._ranked[j]

    def may_move_to(self, j: int, option: int) -> bool:
        """Return whether the job's own limits allow the option elsewhere.

        What the job holds may be outside of its limits.
        """
        spec, gpus = self.table.jobs[j].spec, self.gpus[option]
        return spec.min_gpus <= gpus and (spec.max_gpus is None or gpus <= spec.max_gpus)

    def seat_for(self, j: int, option: int) -> Seat | None:
        """Find a seat for this option; the job's own where it can stay."""
        if self.gpus[option] == 0:
            return NOWHERE
        if not self.packing.within_ceilings(j, self.gpus[option]):
            return None
        if self.kept[option] and self.packing.can_stay(j):
            return self.packing.home[j]
        if self.gpus[option] > self.packing.spare or not self.may_move_to(j, option):
            return None
        return self.packing.find(j, self.table.shape(option))

    def give(self, j: int, option: int, seat: Seat) -> None:
        self.packing.put(j, seat)
        self.option[j] = option

    def best_fit(self, j: int, *, least: bool = False) -> None:
        """Give the job, which sits nowhere, the best of its options that has room.

        With `least`: the smallest option that is better than none.
        """
        gpus, room = self.gpus, self.packing.room(j)
        options = self.ranked(j)
        if least:
            nothing = self.value(int(self.table.start[j]))
            options = sorted([o for o in options if self.value(o) > nothing], key=lambda o: (gpus[o], o))
        for option in options:
            if gpus[option] > room:
                continue
            found = self.seat_for(j, option)
            if found is not None:
                self.give(j, option, found)
                return

    def keep_guarantees(self, chosen: Ints) -> None:
        """Note the guarantees that the counts keep: no later plan breaks one."""
        self.owed = [
            min(g.floor, sum(self.gpus[int(chosen[j])] for j in g.members)) for g in self.table.groups
        ]

    def shortfall(self) -> int:
        """GPUs that guarantees lack."""
        return sum(max(owed - held, 0) for owed, held in zip(self.owed, self.packing.held, strict=True))

    def state(self) -> list[tuple[int, Seat]]:
        """Option and seat of every job, to come back to."""
        return list(zip(self.option, self.packing.seats, strict=True))

    def restore(self, state: list[tuple[int, Seat]]) -> None:
        self.clear()
        for j, (option, seat) in enumerate(state):
            if not self.pinned[j]:
                self.give(j, option, seat)

    def clear(self) -> None:
        """Lift every job that is not pinned."""
        for j, pinned in enumerate(self.pinned):
            if not pinned:
                self.packing.put(j, NOWHERE)
                self.option[j] = int(self.table.start[j])

    def fill(self, chosen: Ints) -> list[int]:
        """Seat the chosen options; return the jobs without room.

        Jobs whose shape stays come first, in their place.
        """
        order, options, kept = self._largest_first(chosen), chosen.tolist(), self.kept
        staying = [j for j in order if kept[options[j]]]
        if self.packing.seat_at_home(staying):
            for j in staying:
                self.option[j] = options[j]
            others = [j for j in order if not kept[options[j]]]
        else:
            others = [
                j
                for j in order
                if not (kept[options[j]] and self.packing.can_stay(j) and self._take(j, options[j]))
            ]
        return [j for j in others if not self._take(j, options[j])]

    def repack(self, chosen: Ints) -> list[int]:
        """Seat the chosen options, the largest first.

        Jobs that could stay give way to larger ones where that is cheapest.

        Returns those without room.
        """
        packing = self.packing
        order = self._largest_first(chosen)
        claims = {
            j: self.stay[int(chosen[j])] - self.move[int(chosen[j])]
            for j in order
            if self.kept[int(chosen[j])] and packing.can_stay(j)
        }
        for j, cost in claims.items():
            packing.claim(packing.home[j], cost)
        left: list[int] = []
        for j in order:
            option = int(chosen[j])
            if j in claims:
                packing.unclaim(packing.home[j], claims[j])
            if not self._take(j, option):
                left.append(j)
        return left

    def _largest_first(self, chosen: Ints) -> list[int]:
        """Return the jobs to place in order.

        Spanning jobs come first, then larger ones; jobs of few nodes before jobs of many.

        Of the spanning ones, first those that need one rack.
        """
        table, picked = self.table, np.asarray(chosen, dtype=np.int64)
        nodes = table.nodes[picked]
        ranked = np.lexsort(
            (
                ~table.kept[picked],
                self.packing.open_to,
                -table.per_node[picked],
                -nodes,
                table.racks[picked] == OVER_RACKS,
                nodes == 1,
            )
        )
        return list(ranked[(table.gpus[picked] > 0)[ranked] & ~table.pinned[ranked]].tolist())

    def _take(self, j: int, option: int) -> bool:
        found = self.seat_for(j, option)
        if found is not None:
            self.give(j, option, found)
        return found is not None

    def settle(self, left: list[int], chosen: Ints) -> None:
        """Give jobs that found no room the best option that is left.

        Jobs with most at stake come first, but each gets something before any of them gets more.
        """
        order = sorted(
            left, key=lambda j: (self.stay[int(self.table.start[j])] - self.value(int(chosen[j])), j)
        )
        for j in order if len(order) > 1 else ():
            self.best_fit(j, least=True)
        for j in order:
            self.packing.put(j, NOWHERE)
            self.option[j] = int(self.table.start[j])
            self.best_fit(j)

    def take(self, chosen: Ints) -> None:
        """Seat the choice where that gains and costs no guarantee.

        Otherwise the present seating stays.
        """
        best, state, short = self.total(), self.state(), self.shortfall()
        for seat in (self.fill, self.repack):
            self.clear()
            self.settle(seat(chosen), chosen)
            if self.total() > best + 1e-9 * abs(best) and self.shortfall() <= short:
                best, state = self.total(), self.state()
        self.restore(state)

    def return_home(self) -> None:
        """Put jobs back on their nodes if these became free.

        These jobs have moved to a seat of the same shape.
        """
        packing = self.packing
        moved = np.flatnonzero(packing.moved()).tolist()
        astray = [j for j in moved if self.kept[self.option[j]] and not self.pinned[j]]
        returned = True
        while returned and astray:
            returned = False
            for j in list(astray):
                seat = packing.seats[j]
                packing.put(j, NOWHERE)
                if packing.can_stay(j):
                    packing.put(j, packing.home[j])
                    astray.remove(j)
                    returned = True  # which may be what the next one waits for
                else:
                    packing.put(j, seat)


def leave_right_nodes(packing: Packing) -> None:
    """Exchange nodes so that jobs that change their size keep the right ones.

    A job that shrinks must keep the first nodes of `SnapshotJob.keeps`, a job that grows must keep all its nodes. The
    job exchanges nodes with the job that would take its node, and only if the two nodes are of the same kind.
    """
    for j, job in enumerate(packing.jobs):
        (own, per_node), (home, before) = packing.seats[j], packing.home[j]
        if job.pinned or not own or per_node != before or len(own) == len(home):
            continue
        wanted = home
        if len(own) < len(home):
            if not job.keeps:
                continue
            wanted, _ = packing.layout.seat(Placement(job.keeps[: len(own)], per_node))
        given = sorted(set(own) - set(wanted))
        for b in sorted(set(wanted) - set(own)):
            for a in given:
                if _exchange(packing, j, a, b):
                    given.remove(a)
                    break


def _exchange(packing: Packing, j: int, a: int, b: int) -> bool:
    """Seat the job on node `b` instead of `a`, and the jobs due on `b` on `a`.

    Returns False, and changes nothing, where the nodes differ, or where another job sits on `b` now or may not move to
    `a`.
    """
    others = [i for i in packing.guests[b] if i != j]
    alone = set(packing.guests[a]) == {j} and j not in packing.guests[b]
    if not alone or not _alike(packing.nodes[a], packing.nodes[b]):
        return False
    if any(packing.jobs[i].contiguous and len(packing.seats[i][0]) > 1 for i in (j, *others)):
        return False
    if any(packing.jobs[i].pinned or b in packing.home[i][0] or not packing.allowed(i)[a] for i in others):
        return False
    moved = [(i, packing.seats[i], (a, b) if i == j else (b, a)) for i in (j, *others)]
    for i, _, _ in moved:
        packing.put(i, NOWHERE)
    for i, (numbers, per_node), (old, new) in moved:
        packing.put(i, (_with(numbers, old, new), per_node))
    return True


def _with(numbers: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted(new if n == old else n for n in numbers))


def _alike(a: Node, b: Node) -> bool:
    """Whether the two nodes are the same for every job."""
    return _kind(a) == _kind(b)


def _kind(node: Node) -> tuple[object, ...]:
    return (
        *(node.gpus, node.gpu_type, node.foreign_gpus, node.schedulable),
        *(node.partitions, node.cpus, node.cpus_per_core, node.foreign_cpus, node.rack),
        *(node.memory_mb, node.foreign_memory_mb),
    )
