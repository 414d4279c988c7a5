"""One decision for the whole cluster: a snapshot in, a plan with reasons out. No I/O, no clock."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from polluxd.model import NO_PLACEMENT, Allocation, Plan, Settings, Snapshot
from polluxd.policy import assignment, exchange, fairness, objective, reasons, sanity, search
from polluxd.policy.cache import Cache
from polluxd.policy.choice import Choice, choose
from polluxd.policy.domains import Domain, split
from polluxd.policy.explain import Explainer
from polluxd.policy.menu import build
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating

Floats = NDArray[np.float64]

ROUNDS, DIVISIONS = 3, 400
"""Turns of the two searches, and pairs of nodes divided anew in all: bounds on work, so that a replay is exact."""
CERTAIN = 1e-3
"""A plan this near the bound of its counts needs no better one."""
TOLERANCE = 1e-4
"""The search stops this near the bound on total utility: fits are not known any better."""


@dataclass(frozen=True, slots=True)
class _Solved:
    """One domain's outcome: per job of its menu, x as planned and in the relaxation that bounds it."""

    allocations: list[Allocation]
    x: Floats
    bound_x: Floats
    weight: Floats
    solver: str
    bound: float
    """On the sum of utilities."""
    plain_bound: float
    """On the sum of what the fitness itself adds up, where utilities order plans beyond that."""


def decide(snapshot: Snapshot, *, cache: Cache | None = None) -> Plan:
    """The plan of largest fitness that was found, with a proven bound.

    Deterministic: the same snapshot gives the same plan, bit for bit, in whatever order nodes and jobs come. Every
    job of the snapshot has an allocation, in order of job id, if only of nothing, with the reason. A `cache` kept from
    one decision to the next saves time and changes nothing else.
    """
    cache = Cache() if cache is None else cache
    cache.begin({job.job_id for job in snapshot.jobs})
    snapshot, doubts = sanity.believable(snapshot)
    mean = fairness.mean_weight(snapshot)
    solved = [_solve(domain, snapshot.settings, mean, cache) for domain in split(snapshot)]
    allocations = sorted((a for part in solved for a in part.allocations), key=lambda a: a.job_id)
    if doubts:
        allocations = [
            replace(a, reason=f"{a.reason}; {doubts[a.job_id]}") if a.job_id in doubts else a
            for a in allocations
        ]
    empty, power = np.zeros(0), snapshot.settings.power
    weight = np.concatenate([empty, *(part.weight for part in solved)])
    fitness = objective.fitness(np.concatenate([empty, *(part.x for part in solved)]), weight, power)
    if power > objective.GENTLE:
        bound = objective.of_total(sum(part.bound for part in solved), float(weight.sum()), power)
    elif np.isfinite(power):
        # Plans are ordered beyond what one number shows; that number has a bound of its own.
        bound = objective.of_total(sum(part.plain_bound for part in solved), float(weight.sum()), power)
    else:
        # The relaxed plan raises the worst-off as far as counts allow.
        bound = objective.fitness(np.concatenate([empty, *(part.bound_x for part in solved)]), weight, power)
    solvers = sorted({part.solver for part in solved if part.weight.size}) or ["none"]
    return Plan(tuple(allocations), fitness, max(fitness, bound), " and ".join(solvers))


def _solve(domain: Domain, settings: Settings, mean_weight: float, cache: Cache) -> _Solved:
    menu = build(domain, settings, mean_weight, cache)
    absent = [
        Allocation(job.job_id, NO_PLACEMENT, 0.0, 0.0, 0, bool(job.placement), reason)
        for job, reason in menu.absent
    ]
    seating = Seating(
        menu, Packing(domain.nodes, menu.jobs, partial=settings.partial_nodes, groups=menu.groups)
    )
    packing = seating.packing
    choice = choose(menu, domain, packing, settings.power)
    _place(seating, choice)
    bound = choice.bound
    if bound - seating.total() > CERTAIN * abs(bound):
        bound = min(bound, assignment.improve(seating))
    explainer = Explainer(seating, int(np.maximum(packing.free, 0).sum()))
    # The starvation bound orders plans before the objective does: it is no part of either side of the gap.
    idle = float(sum(menu.penalty[j] for j in range(len(menu.jobs)) if not seating.gpus[seating.option[j]]))
    moved = np.array([packing.moved(j) for j in range(len(menu.jobs))], dtype=np.bool_)
    x = menu.x(np.array(seating.option, dtype=np.int64), moved)
    return _Solved(
        absent + [_allocation(explainer, j, bool(moved[j])) for j in range(len(menu.jobs))],
        x,
        menu.x(choice.chosen, ~menu.kept[choice.chosen]),
        menu.weight,
        choice.solver,
        min(bound + idle, choice.fair_bound),
        choice.plain_bound,
    )


def _place(seating: Seating, choice: Choice) -> None:
    """Seat the choice, moving no job that need not move; where that loses counts, try moving some, and search."""
    menu, chosen = seating.menu, choice.chosen
    seating.guarantee(chosen)
    left = seating.fill(chosen)
    seating.settle(left, chosen)
    idle = menu.gpus[chosen] == 0
    tolerance = TOLERANCE * abs(float(menu.value[chosen].sum() + menu.penalty[idle].sum()))
    if left:
        total, state = seating.total(), seating.state()
        seating.clear()
        seating.settle(seating.repack(chosen), chosen)
        if seating.total() <= total:
            seating.restore(state)
    limit = DIVISIONS
    for _ in range(ROUNDS):
        before = seating.total()
        search.improve(seating, choice.aim, tolerance)
        limit -= exchange.improve(seating, choice.aim, tolerance, limit)
        if seating.total() <= before + tolerance:
            break


def _allocation(explainer: Explainer, j: int, moved: bool) -> Allocation:
    seating = explainer.seating
    menu, option = seating.menu, seating.option[j]
    explanation = explainer.of(j)
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
        reason=reasons.of(explainer, j, place, explanation),
        explanation=explanation,
    )
