"""One decision for the whole cluster: a snapshot in, a plan with reasons out. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polluxd.model import NO_PLACEMENT, Allocation, Plan, Settings, Snapshot
from polluxd.policy import counts, fairness, objective, placement, reasons
from polluxd.policy.domains import Domain, split
from polluxd.policy.menu import Menu, build
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Solved:
    """One domain's outcome: per job of its menu, x as planned and in the relaxation that bounds it."""

    allocations: list[Allocation]
    x: Floats
    bound_x: Floats
    weight: Floats


def decide(snapshot: Snapshot) -> Plan:
    """The plan of largest fitness that was found, with a proven bound.

    Deterministic: the same snapshot gives the same plan, bit for bit, in whatever order nodes and jobs come. Every
    job of the snapshot has an allocation, in order of job id, if only of nothing, with the reason.
    """
    solved = [_solve(domain, snapshot.settings) for domain in split(snapshot)]
    allocations = sorted((a for part in solved for a in part.allocations), key=lambda a: a.job_id)
    empty = np.zeros(0)
    weight = np.concatenate([empty, *(part.weight for part in solved)])
    weight = weight / weight.mean() if weight.size else weight
    x = np.concatenate([empty, *(part.x for part in solved)])
    bound_x = np.concatenate([empty, *(part.bound_x for part in solved)])
    fitness = objective.fitness(x, weight, snapshot.settings.power)
    bound = objective.fitness(bound_x, weight, snapshot.settings.power)
    return Plan(tuple(allocations), fitness, max(fitness, bound), "dynamic program")


def _solve(domain: Domain, settings: Settings) -> _Solved:
    menu = build(domain, settings)
    absent = [
        Allocation(job.job_id, NO_PLACEMENT, 0.0, 0.0, 0, bool(job.placement), reason)
        for job, reason in menu.absent
    ]
    packing = Packing(domain.nodes, menu.jobs, partial=settings.partial_nodes)
    seating = Seating(menu, packing)
    seating.pin()
    capacity = int(np.maximum(packing.free, 0).sum())
    chosen, bound = _counts(menu, capacity)
    seating.fill(chosen)
    placement.improve(seating, bound)
    free = int(np.maximum(packing.free, 0).sum())
    moved = np.array([packing.moved(j) for j in range(len(menu.jobs))], dtype=np.bool_)
    return _Solved(
        absent + [_allocation(seating, j, bool(moved[j]), free) for j in range(len(menu.jobs))],
        menu.x(seating.option, moved),
        menu.x(chosen, ~menu.kept[chosen]),
        np.array([fairness.weight(job, settings) for job in menu.jobs], dtype=np.float64),
    )


def _counts(menu: Menu, capacity: int) -> tuple[NDArray[np.int64], float]:
    """The count solver over the jobs that are free to change: option per job, and the total utility's bound."""
    gpus = np.where(menu.pinned[menu.owner], 0, menu.gpus)
    return counts.solve(gpus, menu.value, menu.start, capacity)


def _allocation(seating: Seating, j: int, moved: bool, free: int) -> Allocation:
    menu, option = seating.menu, int(seating.option[j])
    job = menu.jobs[j]
    # A pinned job may hold nodes that are no longer known here; what it holds is not ours to edit.
    place = job.placement if menu.pinned[j] or not moved else seating.packing.placement(j)
    return Allocation(
        job_id=job.job_id,
        placement=place,
        goodput=float(menu.goodput[option]) if place else 0.0,
        speedup=float(menu.speedup[option]) if place else 0.0,
        batch_size=int(menu.batch_size[option]) if place else 0,
        changed=place != job.placement,
        reason=reasons.of(seating, j, place, free),
    )
