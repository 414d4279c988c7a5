"""Explain every job's placement, as data.

An explanation has the job's limit, the goodput of its next larger size, and the job that has these GPUs instead. One
vectorised pass over the jobs and options of a finished seating computes all explanations.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from polluxd.model import Explanation, SnapshotJob
from polluxd.policy import feasible
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating
from polluxd.policy.shapes import ANY

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NONE = np.iinfo(np.int64).max


class Explainer:
    """Explanations of one finished seating.

    The jobs of `moved` [J] sit elsewhere than before.
    """

    def __init__(self, seating: Seating, moved: Bools, *, rule: str = ANY) -> None:
        table, start = seating.table, seating.table.start[:-1]
        self.seating, self._rule = seating, rule
        self.free = int(np.maximum(seating.packing.free, 0).sum())
        """GPUs that stay unused."""
        self.free_for = _free_for(seating.packing)
        """[J]: of these, the ones that the job could use."""
        self.option: Ints = np.array(seating.option, dtype=np.int64)
        self.held: Ints = table.gpus[self.option]
        """[J]: GPUs of each job."""
        now = np.where(moved, table.move[self.option], table.stay[self.option])
        owner, gpus, value = table.owner, table.gpus, table.value
        more = gpus - self.held[owner]
        better = (more > 0) & (table.goodput > (table.goodput[self.option] * (1 + 1e-9))[owner])
        with np.errstate(divide="ignore", invalid="ignore"):
            rate = (value - now[owner]) / more
        # Utility per GPU that a job would lose if it gave up some of its GPUs, at the cheapest number of them.
        last = _each(np.minimum, np.where((more < 0) & ~table.pinned[owner], rate, np.inf), start)
        self._donors = np.argsort(last, kind="stable")[:2].tolist()
        self._donors = [j for j in self._donors if last[j] < np.inf]
        self.price = float(last[self._donors[0]]) if self._donors else 0.0
        number = np.arange(gpus.size)
        self.step: Ints = _each(np.minimum, np.where(better, number, _NONE), start)
        """[J]: the smallest option with more GPUs and more goodput than the present one; `_NONE`: there is none."""
        self.has_step: Bools = self.step < _NONE
        self._next: Ints = np.where(self.has_step, self.step, self.option)
        best = _each(np.maximum, np.where(better, rate, -np.inf), start)
        self._marginal = np.where(self.has_step, best, 0.0)
        self._larger = _each(np.logical_or, more > 0, start)
        self._too_dear = _each(np.maximum, np.where(better, table.move, -np.inf), start) <= now
        before = _each(np.minimum, np.where(table.kept, number, _NONE), start)
        self.goodput_before: Floats = np.where(
            before < _NONE, table.goodput[np.where(before < _NONE, before, 0)] if gpus.size else 0.0, 0.0
        )
        """[J]: goodput on what the job holds, 0 where it cannot stay."""

    def all(self) -> list[Explanation]:
        """One explanation per job of the table."""
        table = self.seating.table
        limits = self._limits()
        takers = [self._taker(j) for j in range(len(self._donors) + 1)]
        donors = {j: takers[number] for number, j in enumerate(self._donors)}
        anybody = takers[-1]
        # Column by column: one line of Python less per job and field.
        return list(
            map(
                Explanation,
                [share.nodes for share in table.shares],
                [share.gpus for share in table.shares],
                table.weight.tolist(),
                limits,
                [gpus or None for gpus in np.where(self.has_step, table.gpus[self._next], 0).tolist()],
                np.where(self.has_step, table.goodput[self._next], 0.0).tolist(),
                self._marginal.tolist(),
                [self.price] * len(limits),
                [donors.get(j, anybody) if limit == "contention" else None for j, limit in enumerate(limits)],
                np.where(self.has_step, table.factor[self._next], 1.0).tolist(),
                [_move_seconds(job) for job in table.jobs],
                [0] * len(limits),
                self._prices(),
            )
        )

    def _prices(self) -> list[float | None]:
        """Return the price of a GPU [J] of the type that the job has or wants."""
        table = self.seating.table
        if table.market is None:
            return [None] * len(table.jobs)
        price = table.market.price
        kind = table.kind[np.where(self.held > 0, self.option, self._next)]
        return [float(p) for p in np.where(kind >= 0, price[kind], price.mean())]

    def _taker(self, number: int) -> int | None:
        """Return the job whose last GPUs are worth the least.

        The donor with this number is left out.
        """
        others = [j for place, j in enumerate(self._donors) if place != number]
        return self.seating.table.jobs[others[0]].job_id if others else None

    def _limits(self) -> list[str]:
        """[J]: what keeps each job from more."""
        seating, table = self.seating, self.seating.table
        needed = table.gpus[self._next] - self.held
        found = np.where(self.free_for >= needed, "fragmentation", "contention").astype(object)
        if table.groups:
            for j in np.flatnonzero(self.has_step).tolist():
                if not seating.packing.within_ceilings(j, int(needed[j])):
                    found[j] = "ceiling"
        found[self._too_dear] = "move-cost"
        found[~self.has_step] = "goodput"
        for j in np.flatnonzero(~self.has_step & ~self._larger & ~table.pinned).tolist():
            job = table.jobs[j]
            found[j] = own_limit(job, int(self.held[j]), table.caps.of(job), self._rule)
        found[table.pinned] = "stays"
        return list(found.tolist())

    def ceiling(self, j: int) -> tuple[str, int | None]:
        """Return the ceilings that keep job number `j` from its next option; see `reasons.Facts`."""
        packing = self.seating.packing
        more = int(self.seating.table.gpus[self._next[j]] - self.held[j])
        for group in packing.groups if not self.held[j] else ():
            if j in group.members and more > group.ceiling:
                return group.name, group.ceiling
        full = [
            group.name
            for group, held in zip(packing.groups, packing.held, strict=True)
            if j in group.members and held + more > group.ceiling
        ]
        return " and ".join(full), None


def _free_for(packing: Packing) -> Ints:
    """[J]: unused GPUs on the nodes that each job may use, with the CPUs and the memory that go with them."""
    known: dict[tuple[int, bool, int, bytes], int] = {}
    found = []
    for j, job in enumerate(packing.jobs):
        allowed, memory = packing.allowed(j), packing.memory_per_gpu[j]
        key = job.spec.cpus_per_gpu, job.spec.one_thread, memory, allowed.tobytes()
        if key not in known:
            threads = packing.layout.cpus_per_core
            cpus = packing.cpus // threads * (1 if job.spec.one_thread else threads)
            room = np.minimum(packing.free, cpus // max(job.spec.cpus_per_gpu, 1))
            room = np.minimum(room, packing.memory // memory) if memory else room
            known[key] = int(np.maximum(room, 0)[allowed].sum())
        found.append(known[key])
    return np.array(found, dtype=np.int64)


def _move_seconds(job: SnapshotJob) -> float:
    """The most likely cost of the job's next move."""
    if not job.started:
        return 0.0
    return job.move_cost if job.resize_cost is None else job.resize_cost


def _each(fold: np.ufunc, values: NDArray[Any], start: Ints) -> NDArray[Any]:
    """The values of every job's options [O] as one per job [J]."""
    return np.asarray(fold.reduceat(values, start)) if start.size else values


def own_limit(job: SnapshotJob, held: int, most: int, rule: str = ANY) -> str:
    """Return which of its own limits keeps a job at the `held` GPUs.

    The job has no option of more GPUs. `most`: GPUs that its measurements justify. `rule`: the cluster's rule of GPU
    counts.
    """
    spec = job.spec
    if spec.max_gpus is not None and held >= spec.max_gpus:
        return "max-gpus"
    limits = job.report.limits if job.report is not None else None
    if limits is not None:
        top = limits.maximum if spec.adaptive else limits.initial
        if (held + 1) * limits.local_min > top:
            return "batch"
    if spec.max_gpus is not None and spec.max_gpus <= most:
        return "max-gpus"
    if held * feasible.GROWTH > most or held >= most:
        return "progress" if job.report is not None and job.report.most_gpus == most else "exploration"
    return "nodes" if rule == spec.gpu_counts == ANY else "counts"
