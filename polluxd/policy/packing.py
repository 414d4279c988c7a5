"""Which job sits on which nodes.

Rules held here: no node above its GPUs, CPUs or memory, partitions respected, several nodes only of one class (GPU type
and size) and whole unless partial nodes are allowed, and never two multi-node jobs on one node (interference avoidance,
Pollux section 4.2.1).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.model import Node, Placement, SnapshotJob
from polluxd.policy.domains import NOWHERE, Layout, Seat, partitions_of_each
from polluxd.policy.feasible import is_pinned
from polluxd.policy.owners import Group, of_job
from polluxd.policy.shapes import ANYWHERE, ONE_RACK, OVER_RACKS, Shape

Bools = NDArray[np.bool_]


class Packing:
    """Mutable state of one packing.

    Jobs are numbers into `jobs`, nodes numbers into `nodes`, described by `layout`.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        jobs: Sequence[SnapshotJob],
        *,
        partial: bool,
        groups: Sequence[Group] = (),
        layout: Layout | None = None,
    ) -> None:
        layout = Layout(nodes) if layout is None else layout
        self.layout = layout
        self.nodes = nodes
        self.jobs = jobs
        self.partial = partial
        self.free = layout.capacity.copy()
        self.spare = int(np.maximum(self.free, 0).sum())
        """All free GPUs together. If a shape needs more, no node needs to be examined."""
        self.cpus = layout.cpus.copy()
        self.memory = layout.memory.copy()
        self.spanned = np.zeros(len(nodes), dtype=np.int64)
        """Multi-node jobs on each node: 0 or 1, or more if the snapshot has pinned jobs placed so."""
        self.guests: list[dict[int, int]] = [{} for _ in nodes]
        """Per node: GPUs by job."""
        self.movable = np.zeros(len(nodes), dtype=np.int64)
        """GPUs per node of guests that are not pinned."""
        self.claimed = np.zeros(len(nodes), dtype=np.int64)
        self.claim_cost = np.zeros(len(nodes))
        """GPUs per node that jobs not seated yet would like to stay on, and what it costs if they cannot."""
        self.seats: list[Seat] = [NOWHERE] * len(jobs)
        self.groups = groups
        self.held = [0] * len(groups)
        """GPUs that each group's jobs hold."""
        self._groups = of_job(groups, len(jobs))
        self._pinned = [is_pinned(j) for j in jobs]
        self._cpus_per_gpu = [j.spec.cpus_per_gpu for j in jobs]
        self._cpus_per_core = layout.cpus_per_core
        self.memory_per_gpu = [j.spec.mem_per_gpu_mb or 0 for j in jobs]
        self.rack = layout.rack
        self._partitions = partitions_of_each(jobs)
        self.popularity = np.zeros(len(nodes), dtype=np.int64)
        """Per node, how many kinds of job (by partitions) could use it."""
        self.reach = dict.fromkeys(self._partitions, 0)
        """Per kind of job, how many nodes it could use."""
        for partitions in self.reach:
            allowed = layout.allowed(partitions)
            self.popularity += allowed
            self.reach[partitions] = int(allowed.sum())
        self.open_to = np.array([self.reach[p] for p in self._partitions], dtype=np.int64)
        """Per job, how many nodes it could use."""
        self.home: list[Seat] = [layout.seat(j.placement) for j in jobs]
        """Where each job sits at present, as far as its nodes are known here."""

    def cpus_taken(self, j: int, per_node: int, cpus_per_core: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return what Slurm takes for so many GPUs of a job on nodes with these cores: whole cores."""
        asked = per_node * self._cpus_per_gpu[j]
        if self.jobs[j].spec.one_thread:
            return asked * cpus_per_core
        return -(-asked // cpus_per_core) * cpus_per_core

    def cpus_on(self, j: int, n: int, per_node: int) -> int:
        """Return the same for one node."""
        asked = per_node * self._cpus_per_gpu[j]
        if not self.layout.whole_cores:
            return asked
        return int(self.cpus_taken(j, per_node, self._cpus_per_core[n]))

    def allowed(self, j: int) -> Bools:
        """Nodes that the job's partitions allow."""
        return self.layout.allowed(self._partitions[j])

    def suited(self, j: int, shape: Shape) -> Bools:
        """Nodes that the job's partitions and the shape's GPU type allow."""
        if shape.gpu_type is None:
            return self.allowed(j)
        return self.allowed(j) & self.layout.of_type[shape.gpu_type]

    def roomy(self, j: int, shape: Shape) -> Bools:
        """Nodes that could take the job's part of this shape now."""
        fits = self.suited(j, shape) & (self.free >= shape.per_node)
        fits &= self.cpus >= self.cpus_taken(j, shape.per_node, self._cpus_per_core)
        if memory := self.memory_per_gpu[j]:
            fits &= self.memory >= shape.per_node * memory
        if shape.nodes > 1:
            fits &= self.spanned == 0
        return fits

    def find(self, j: int, shape: Shape) -> Seat | None:
        """Find a seat of this shape.

        Nodes that the job holds come first, then nodes where least is left over.
        """
        if shape.nodes > 1 and self.jobs[j].contiguous:
            return self._run(j, shape)
        numbers = np.flatnonzero(self.roomy(j, shape))
        if numbers.size < shape.nodes:
            return None
        free = self.free[numbers]
        unclaimed = free - self.claimed[numbers]
        # Prefer, in this order: nodes where no job has to give way, the job's own nodes, nodes that few other jobs
        # could use, the tightest fit.
        evicts = np.where(unclaimed >= shape.per_node, 0.0, self.claim_cost[numbers])
        leftover = np.where(unclaimed >= shape.per_node, unclaimed, free)
        for number in self.home[j][0]:
            leftover[numbers == number] = -1
        order = np.lexsort((leftover, self.popularity[numbers], leftover >= 0, evicts))
        ranked = numbers[order]
        if shape.nodes == 1:
            return (int(ranked[0]),), shape.per_node
        return self._span(shape, ranked, evicts[order] > 0)

    def _span(self, shape: Shape, ranked: NDArray[np.int64], evicts: Bools) -> Seat | None:
        """Return nodes of one class for a multi-node shape.

        They are the first in the ranking, of the class that ranks best.
        """
        best: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        place = np.full(len(self.nodes), -1, dtype=np.int64)
        place[ranked] = np.arange(ranked.size)
        for size, members in self.layout.classes:
            if shape.per_node > size or (shape.per_node != size and not self.partial):
                continue
            inside = np.sort(place[members][place[members] >= 0])
            if inside.size < shape.nodes:
                continue
            for preference, picked in self._sets(shape, self.rack[ranked[inside]], inside, evicts):
                order = (*preference, int(picked[-1]))
                if best is None or order < best[0]:
                    best = order, tuple(sorted(ranked[picked].tolist()))
        return None if best is None else (best[1], shape.per_node)

    def _run(self, j: int, shape: Shape) -> Seat | None:
        """Return nodes of one class that follow each other in Slurm's order.

        As in `find`, no job gives way if possible, and the job keeps nodes.
        """
        roomy, home = self.roomy(j, shape), {*self.home[j][0]}
        cost = np.where(self.free - self.claimed >= shape.per_node, 0.0, self.claim_cost)
        best: tuple[tuple[float, ...], tuple[int, ...]] | None = None
        for size, members in self.layout.classes:
            if shape.per_node != size and not (self.partial and shape.per_node < size):
                continue
            for run in self.runs(shape, members[roomy[members]]):
                picked, kept = list(run), len(home.intersection(run))
                order = (float(cost[picked].sum()), -kept, float(self.popularity[picked].sum()), *run)
                if best is None or order < best[0]:
                    best = order, run
        return None if best is None else (best[1], shape.per_node)

    def runs(self, shape: Shape, numbers: NDArray[np.int64]) -> Iterator[tuple[int, ...]]:
        """Yield those of the nodes that follow each other, as a shape needs them."""
        inside = numbers[np.argsort(self.layout.position[numbers], kind="stable")]
        for first in range(inside.size - shape.nodes + 1):
            run = inside[first : first + shape.nodes]
            if self.consecutive(run) and self.lies_in(run, shape.racks):
                yield tuple(sorted(run.tolist()))

    def consecutive(self, numbers: Sequence[int] | NDArray[np.int64]) -> bool:
        """Whether the nodes follow each other in Slurm's order."""
        return bool(np.all(np.diff(np.sort(self.layout.position[list(numbers)])) == 1))

    def _sets(
        self, shape: Shape, rack: NDArray[np.int64], inside: NDArray[np.int64], evicts: Bools
    ) -> Iterator[tuple[tuple[int, int, int], NDArray[np.int64]]]:
        """Yield places in the ranking for a shape, with a preference.

        The places are among `inside`, of racks `rack`. If the shape does not ask for a number of racks, one rack is
        preferred: of the racks that can hold the whole job, first one where no other job has to give way, then the one
        with least room.
        """
        if rack[0] < 0:
            yield (0, 0, 0), inside[: shape.nodes]
            return
        if shape.racks != OVER_RACKS:
            for number in np.unique(rack).tolist():
                group = inside[rack == number]
                picked = group[: shape.nodes]
                if group.size >= shape.nodes:
                    yield (0, int(evicts[picked].any()), group.size), picked
        if shape.racks != ONE_RACK:
            picked = inside[: shape.nodes]
            if shape.racks == OVER_RACKS and np.all(rack[: shape.nodes] == rack[0]):
                others = inside[rack != rack[0]]
                if others.size == 0:
                    return
                picked = np.append(picked[:-1], others[0])
            yield (1, 0, 0), picked

    def lies_in(self, numbers: Sequence[int] | NDArray[np.int64], racks: int) -> bool:
        """Whether these nodes lie in one rack, or in several, as a shape asks for."""
        if racks == ANYWHERE or len(numbers) < 2:
            return True
        return (len(set(self.rack[list(numbers)].tolist())) == 1) == (racks == ONE_RACK)

    def can_stay(self, j: int) -> bool:
        """Whether the job's present seat is free for it."""
        home = self.home[j]
        return len(home[0]) == len(self.jobs[j].placement.nodes) and self.fits(j, home)

    def fits(self, j: int, seat: Seat) -> bool:
        """Whether every node of the seat has room for the job's part."""
        numbers, per_node = seat
        allowed = self.allowed(j)
        alone, memory = len(numbers) == 1, per_node * self.memory_per_gpu[j]
        if self.jobs[j].contiguous and seat != self.home[j] and not self.consecutive(numbers):
            return False
        for n in numbers:
            if self.free[n] < per_node or not allowed[n] or self.cpus[n] < self.cpus_on(j, n, per_node):
                return False
            if memory and self.memory[n] < memory:
                return False
            if not alone and self.spanned[n]:
                return False
        return bool(numbers)

    def seat_at_home(self, jobs: Sequence[int]) -> bool:
        """Seat these jobs at home: all at once, or none.

        They sit nowhere now, and each could stay alone.
        """
        seats = [self.home[j] for j in jobs]
        taken = [
            (n, per_node, j, len(numbers) > 1)
            for j, (numbers, per_node) in zip(jobs, seats, strict=True)
            for n in numbers
        ]
        if not taken:
            return True
        number, gpus, _, several = np.array(taken, dtype=np.int64).T
        cpus_of = np.array([self.cpus_on(j, n, per_node) for n, per_node, j, _ in taken], dtype=np.int64)
        memory_each = np.array([self.memory_per_gpu[j] for _, _, j, _ in taken], dtype=np.int64)
        used, cpus, memory, spans = (np.zeros(len(self.nodes), dtype=np.int64) for _ in range(4))
        np.add.at(used, number, gpus)
        np.add.at(cpus, number, cpus_of)
        np.add.at(memory, number, gpus * memory_each)
        np.add.at(spans, number, several)
        held = list(self.held)
        for j, (numbers, per_node) in zip(jobs, seats, strict=True) if held else ():
            for group in self._groups[j]:
                held[group] += len(numbers) * per_node
        if (
            np.any(used > self.free)
            or np.any(cpus > self.cpus)
            or np.any(memory > self.memory)
            or np.any((spans > 0) & (spans + self.spanned > 1))
            or any(now > group.ceiling for now, group in zip(held, self.groups, strict=True))
        ):
            return False
        self.free -= used
        self.spare = int(np.maximum(self.free, 0).sum())
        self.cpus -= cpus
        self.memory -= memory
        self.spanned += spans
        self.movable += used
        self.held = held
        for n, per_node, j, _ in taken:
            self.guests[n][j] = per_node
        for j, seat in zip(jobs, seats, strict=True):
            self.seats[j] = seat
        return True

    def put(self, j: int, seat: Seat) -> None:
        """Move the job to the seat (NOWHERE: off), which the caller found free."""
        memory, pinned = self.memory_per_gpu[j], self._pinned[j]
        for (numbers, per_node), sign in ((self.seats[j], 1), (seat, -1)):
            change, several = sign * per_node, len(numbers) > 1
            for n in numbers:
                free = int(self.free[n])
                self.spare += max(free + change, 0) - max(free, 0)
                self.free[n] = free + change
                self.cpus[n] += sign * self.cpus_on(j, n, per_node)
                if memory:
                    self.memory[n] += change * memory
                if several:
                    self.spanned[n] -= sign
                if not pinned:
                    self.movable[n] -= change
                if sign > 0:
                    del self.guests[n][j]
                else:
                    self.guests[n][j] = per_node
        for group in self._groups[j]:
            self.held[group] += len(seat[0]) * seat[1] - len(self.seats[j][0]) * self.seats[j][1]
        self.seats[j] = seat

    def within_ceilings(self, j: int, gpus: int) -> bool:
        """Whether the job, which sits nowhere, may be given so many GPUs."""
        # A loop, not all(): most jobs are in no group.
        for g in self._groups[j]:  # noqa: SIM110
            if self.held[g] + gpus > self.groups[g].ceiling:
                return False
        return True

    def room(self, j: int) -> int:
        """Most GPUs that the job, which sits nowhere, may find free; 0 at least."""
        room = self.spare
        for g in self._groups[j]:
            room = min(room, self.groups[g].ceiling - self.held[g])
        return max(room, 0)

    def claim(self, seat: Seat, cost: float) -> None:
        """Note that a job would like to stay here, and its loss otherwise."""
        for n in seat[0]:
            self.claimed[n] += seat[1]
            self.claim_cost[n] += cost

    def unclaim(self, seat: Seat, cost: float) -> None:
        for n in seat[0]:
            self.claimed[n] -= seat[1]
            self.claim_cost[n] = self.claim_cost[n] - cost if self.claimed[n] else 0.0

    def moved(self) -> Bools:
        """[J]: who sits elsewhere than at present."""
        pairs = zip(self.seats, self.home, strict=True)
        return np.array([seat is not home and seat != home for seat, home in pairs], dtype=np.bool_)

    def placement(self, j: int) -> Placement:
        numbers, per_node = self.seats[j]
        return Placement(tuple(self.nodes[n].name for n in numbers), per_node)
