"""One decision for the whole cluster: from a snapshot to a plan.

Every allocation has its reason. No I/O, no clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import NO_PLACEMENT, Allocation, Explanation, Placement, Plan, Snapshot
from polluxd.policy import assignment, objective, patterns, reasons, steep
from polluxd.policy.choice import Choice, choose
from polluxd.policy.domains import Domain, split
from polluxd.policy.explain import Explainer
from polluxd.policy.listing import Cache
from polluxd.policy.option_table import build
from polluxd.policy.owners import divided, mean_weight, ranked
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating, leave_right_nodes

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

CLOSE = 1e-4
"""A plan this near the bound on total utility needs no better one: fits are not known any better."""


@dataclass(frozen=True, slots=True)
class _Solved:
    """One domain's outcome: per job of its table, x as planned and its weight."""

    allocations: list[Allocation]
    x: Floats
    weight: Floats
    solver: str
    total: float
    """The sum of utilities."""
    bound: float
    """On that sum."""
    plain_bound: float
    """On the sum of what the fitness itself adds up, where utilities order plans beyond that; of max-min on itself."""
    fair: Mapping[int, float]
    """Goodput at the fair share, by job; nan where the job has no fit."""
    prices: Mapping[str, float]
    """Of a GPU, by type; empty where the objective has no price."""


def decide(snapshot: Snapshot, *, cache: Cache | None = None, explained: bool = True) -> Plan:
    """The plan of largest fitness that was found, with a proven bound.

    The plan is deterministic: the same snapshot gives the same plan, bit for bit, in any order of nodes and jobs. The
    plan has an allocation for every job of the snapshot, in order of job id; an allocation may have no GPUs. With
    `explained`, each has its reason and explanation. To save time, pass the same `cache` to each decision. It does not
    change the plan.
    """
    cache = Cache() if cache is None else cache
    cache.begin({job.job_id for job in snapshot.jobs})
    snapshot = divided(snapshot)
    mean = mean_weight(snapshot)
    solved = [
        _solve(ranked(domain, snapshot.settings), snapshot.settings, mean, cache, explained=explained)
        for domain in split(snapshot)
    ]
    allocations = sorted((a for part in solved for a in part.allocations), key=attrgetter("job_id"))
    if explained:
        fair = {job_id: goodput for part in solved for job_id, goodput in part.fair.items()}
        allocations = reasons.with_remarks(snapshot, allocations, fair)
    solver = " and ".join(sorted({part.solver for part in solved if part.weight.size}) or ["none"])
    empty, power = np.zeros(0), objective.summed_power(snapshot.settings)
    weight = np.concatenate([empty, *(part.weight for part in solved)])
    if objective.is_priced(snapshot.settings):
        fitness, bound = sum(part.total for part in solved), sum(part.bound for part in solved)
        return Plan(tuple(allocations), fitness, max(fitness, bound), solver, _dearest(solved))
    fitness = objective.fitness(np.concatenate([empty, *(part.x for part in solved)]), weight, power)
    if power > objective.GENTLE:
        bound = objective.of_total(sum(part.bound for part in solved), float(weight.sum()), power)
    elif np.isfinite(power):
        # Utilities order these plans more finely than the fitness does. The fitness has a separate bound.
        bound = objective.of_total(sum(part.plain_bound for part in solved), float(weight.sum()), power)
    else:
        # The worst-off job of all is in one of the domains.
        bound = min((part.plain_bound for part in solved if part.weight.size), default=0.0)
    return Plan(tuple(allocations), fitness, max(fitness, bound), solver)


def _dearest(solved: Iterable[_Solved]) -> dict[str, float]:
    """Return the highest price of each GPU type in any domain; 0 without jobs."""
    found: dict[str, float] = {}
    for part in solved:
        for kind, price in part.prices.items():
            found[kind] = max(price, found.get(kind, 0.0))
    return found or {"": 0.0}


def _solve(
    domain: Domain, settings: PolicySettings, mean_weight: float, cache: Cache, *, explained: bool
) -> _Solved:
    table = build(domain, settings, mean_weight, cache)
    packing = Packing(
        domain.nodes, table.jobs, partial=settings.partial_nodes, groups=table.groups, layout=table.layout
    )
    seating = Seating(table, packing)
    power = objective.summed_power(settings)
    choice = choose(table, domain, packing, power)
    bound = _place(seating, choice, power)
    plain_bound = choice.plain_bound
    if not np.isfinite(power):
        plain_bound = steep.lift(seating, plain_bound)
    elif power <= objective.GENTLE:
        plain_bound = steep.improve(seating, power, plain_bound)
    seating.return_home()
    leave_right_nodes(packing)
    absent = [
        Allocation(job.job_id, NO_PLACEMENT, 0.0, 0.0, 0, bool(job.placement), reason)
        for job, reason in table.absent
    ]
    moved = packing.moved()
    option = np.array(seating.option, dtype=np.int64)
    explainer = Explainer(seating, moved, rule=settings.gpu_counts) if explained else None
    return _Solved(
        absent + _allocations(seating, moved, option, explainer),
        table.x(option, moved),
        table.weight,
        choice.solver,
        seating.total(),
        bound,
        plain_bound,
        {
            job.job_id: goodput if job.report is not None and job.report.params is not None else math.nan
            for job, goodput in zip(table.jobs, table.fair.tolist(), strict=True)
        },
        {} if table.market is None else table.market.of_types(table.types),
    )


def _place(seating: Seating, choice: Choice, power: float) -> float:
    """Seat the choice, and move no job that need not move.

    If the chosen counts do not fit onto the nodes, an integer program that knows nodes chooses again: first the program
    of node patterns, then, if few options remain, the program with a variable per node. Returns a bound on the total.
    """
    chosen, bound = choice.chosen, choice.bound
    seating.keep_guarantees(chosen)
    left = seating.fill(chosen)
    seating.settle(left, chosen)
    if left and _short(seating, choice.aim):
        seating.take(chosen)
    # The options that a program leaves out are in no plan better than the present one.
    gentle = power > objective.GENTLE
    if gentle and _short(seating, bound):
        total = seating.total()
        bound = min(bound, max(total, patterns.improve(seating.among(choice.reach))))
    if _short(seating, bound):
        total = seating.total()
        found = assignment.improve(seating.among(choice.reach), after_patterns=gentle)
        bound = min(bound, max(total, found))
    return bound


def _short(seating: Seating, bound: float) -> bool:
    """Whether a plan may lie between the present one and the bound."""
    return seating.total() < bound - CLOSE * abs(bound)


def _allocations(
    seating: Seating, moved: Bools, option: Ints, explainer: Explainer | None
) -> list[Allocation]:
    """Every job's allocation, in the table's order.

    With an explainer, each has its reason.
    """
    table, packing = seating.table, seating.packing
    # A pinned job may hold nodes that the snapshot does not have. Its placement stays as it is.
    moves = moved & ~table.pinned
    places = [packing.placement(j) if moves[j] else job.placement for j, job in enumerate(table.jobs)]
    explained: list[tuple[str, Explanation | None]] = (
        [("", None)] * len(places) if explainer is None else _explained(seating, places, option, explainer)
    )
    found: list[Allocation] = []
    for job, place, goodput, speedup, batch, (reason, explanation) in zip(
        table.jobs,
        places,
        table.goodput[option].tolist(),
        table.speedup[option].tolist(),
        table.batch_size[option].tolist(),
        explained,
        strict=True,
    ):
        held = bool(place.nodes)
        found.append(
            Allocation(
                job.job_id,
                place,
                goodput if held else 0.0,
                speedup if held else 0.0,
                batch if held else 0,
                place is not job.placement and place != job.placement,
                reason,
                explanation,
            )
        )
    return found


def _explained(
    seating: Seating, places: Sequence[Placement], option: Ints, explainer: Explainer
) -> list[tuple[str, Explanation | None]]:
    """Return each job's reason and explanation."""
    table, found = seating.table, list[tuple[str, Explanation | None]]()
    pinned, goodput, speedup = (
        values.tolist() for values in (table.pinned, table.goodput[option], table.speedup[option])
    )
    before = explainer.goodput_before.tolist()
    for j, (job, place, explanation) in enumerate(zip(table.jobs, places, explainer.all(), strict=True)):
        if pinned[j]:
            found.append((reasons.of_pinned(job), explanation))
            continue
        ceiling = explainer.ceiling(j) if explanation.limit == "ceiling" else ("", None)
        most, free = table.caps.of(job), int(explainer.free_for[j])
        facts = reasons.Facts(
            *(job, place, explanation, speedup[j], goodput[j], before[j]),
            most=most,
            free=free,
            ceiling=ceiling,
        )
        found.append((reasons.of(facts), explanation))
    return found
