"""Every plan of a small cluster, and random clusters of that size.

The clusters are small enough to try all their plans.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from polluxd.model import Placement, Plan, Snapshot
from polluxd.policy import decide, objective, owners
from polluxd.policy.domains import NOWHERE, split
from polluxd.policy.option_table import build
from polluxd.policy.packing import Packing
from polluxd.policy.shapes import ANYWHERE, ONE_RACK
from tests.unit.policy.scenarios import random_snapshot

POWERS = (-1.0, 0.0, 1.0)


def every_seat(table, packing, j):
    """All (option, seat) of a job, by its own rules alone."""
    if table.pinned[j]:
        return [(int(table.start[j]), packing.home[j])]
    spec, found = table.jobs[j].spec, []
    for option in table.options(j):
        shape = table.shape(option)
        if shape.nodes == 0:
            found.append((option, NOWHERE))
            continue
        allowed = packing.suited(j, shape)
        inside = spec.min_gpus <= shape.gpus and (spec.max_gpus is None or shape.gpus <= spec.max_gpus)
        for numbers in itertools.combinations(range(len(packing.nodes)), shape.nodes):
            seat = (numbers, shape.per_node)
            sizes = {packing.nodes[n].gpus for n in numbers}
            whole = shape.nodes == 1 or packing.partial or sizes == {shape.per_node}
            racks = {packing.nodes[n].rack for n in numbers}
            lies_well = shape.racks == ANYWHERE or (len(racks) == 1) == (shape.racks == ONE_RACK)
            open_to = whole and len(sizes) == 1 and all(allowed[n] for n in numbers) and lies_well
            if open_to and (seat == packing.home[j] or inside):
                found.append((option, seat))
    return found


def _fitness(table, chosen, moved, settings) -> float:
    if objective.is_priced(settings):
        return float(np.where(moved, table.move[chosen], table.stay[chosen]).sum())
    return objective.fitness(table.x(chosen, moved), table.weight, objective.summed_power(settings))


def best_plan(snap: Snapshot) -> float:
    """The fitness of the best plan of one domain, by trying all."""
    (domain,) = split(snap)
    table = build(domain, snap.settings, owners.mean_weight(snap))
    packing = Packing(domain.nodes, table.jobs, partial=snap.settings.partial_nodes, groups=table.groups)
    best, jobs = -np.inf, len(table.jobs)
    chosen = np.zeros(jobs, dtype=np.int64)

    def go(j: int) -> None:
        nonlocal best
        if j == jobs:
            moved = packing.moved()
            best = max(best, _fitness(table, chosen, moved, snap.settings))
            return
        for option, seat in every_seat(table, packing, j):
            held = len(seat[0]) * seat[1]
            free = table.pinned[j] or seat == NOWHERE
            if not free and not (packing.fits(j, seat) and packing.within_ceilings(j, held)):
                continue
            packing.put(j, seat)
            chosen[j] = option
            go(j + 1)
            packing.put(j, NOWHERE)

    # Pinned jobs first: what they hold is taken before anybody chooses.
    order = sorted(range(jobs), key=lambda j: not table.pinned[j])
    if order != list(range(jobs)):
        return np.nan
    go(0)
    return best


def small(seed: int) -> Snapshot:
    """Return a random cluster of at most three nodes and four jobs.

    The cluster has partitions, foreign GPUs and ceilings, but no guarantee.
    """
    return _free(random_snapshot(seed, jobs=1 + seed % 4, count=1 + seed % 3, power=POWERS[seed % 3]))


def _free(snap: Snapshot) -> Snapshot:
    """Remove everything that the fitness alone does not show.

    No job stays pinned, every job is preemptible, and guarantees go. Where jobs run, new jobs
    start on one GPU: no larger start may park a running job, whatever the fitness says.
    """
    jobs = tuple(replace(j, pinned=False, spec=replace(j.spec, preemptible=True)) for j in snap.jobs)
    start = 1 if any(j.placement for j in jobs) else snap.settings.start_gpus
    settings = replace(snap.settings, account_guarantees={}, start_gpus=start)
    return replace(snap, jobs=jobs, settings=settings)


def with_types(snap: Snapshot, seed: int) -> Snapshot:
    """Give the nodes of a cluster two GPU types, in turn.

    Each job with measured parameters has a random speed on the second type.
    """
    rng = np.random.default_rng(seed)
    nodes = tuple(replace(n, gpu_type="ab"[i % 2]) for i, n in enumerate(snap.nodes))
    jobs = []
    for j in snap.jobs:
        found = j.report
        if found is not None and found.params is not None:
            factor = rng.uniform(0.3, 4)
            fit = found.params._replace(
                alpha_grad=found.params.alpha_grad / factor, beta_grad=found.params.beta_grad / factor
            )
            found = replace(found, params_by_type={"b": fit})
        jobs.append(replace(j, report=found))
    return replace(snap, nodes=nodes, jobs=tuple(jobs))


def with_racks(snap: Snapshot, seed: int) -> Snapshot:
    """Put the nodes of a cluster into two or three racks.

    Most jobs are slower over racks than within one. Some jobs hold nodes of two racks.
    """
    rng = np.random.default_rng(seed)
    names = [f"r{rng.integers(0, 2 + seed % 2)}" for _ in snap.nodes]
    nodes = tuple(replace(n, rack=rack) for n, rack in zip(snap.nodes, names, strict=True))
    left = {n.name: n.capacity for n in nodes}
    for j in snap.jobs:
        for name in j.placement.nodes:
            left[name] -= j.placement.gpus_per_node
    whole = [n.name for n in nodes if left[n.name] == n.gpus]
    jobs = []
    for j in snap.jobs:
        found = j.report
        if found is not None and found.params is not None and rng.random() < 0.8:
            worse = rng.uniform(1, 30)
            fit = found.params._replace(
                alpha_rack=found.params.alpha_node * worse, beta_rack=found.params.beta_node * worse
            )
            found = replace(found, params=fit)
        place, started = j.placement, j.started
        if not place and len(whole) > 1 and rng.random() < 0.3:
            held, whole = whole[:2], whole[2:]
            place, started = Placement(tuple(held), nodes[0].gpus), True
        jobs.append(replace(j, report=found, partition="main,side", placement=place, started=started))
    return replace(snap, nodes=nodes, jobs=tuple(jobs))


def two_types(seed: int) -> Snapshot:
    return with_types(small(seed), seed)


def racked(seed: int) -> Snapshot:
    """Three or four nodes in racks."""
    snap = random_snapshot(seed, jobs=1 + seed % 4, count=3 + seed % 2, power=POWERS[seed % 3])
    return _free(with_racks(snap, seed))


def at_power(power: float) -> Callable[[int], Snapshot]:
    def made(seed: int) -> Snapshot:
        snap = small(seed)
        return replace(snap, settings=replace(snap.settings, power=power))

    return made


class Compared(NamedTuple):
    seed: int
    plan: Plan
    best: float
    """The fitness of the best plan there is."""

    @property
    def shortfall(self) -> float:
        """How far below the best the plan lies, relative to it."""
        return max(1.0 - self.plan.objective / self.best, 0.0) if self.best > 0 else 0.0

    @property
    def looseness(self) -> float:
        """How far above the best the bound lies, relative to it."""
        return self.plan.upper_bound / self.best - 1.0 if self.best > 0 else 0.0


def compared(make: Callable[[int], Snapshot], seeds: range, *, solver: str = "") -> list[Compared]:
    """The plans of these seeds' clusters beside the best there are.

    Left out are those of several domains, of large nodes (too many plans to try), where no plan is possible, and
    where another solver than the one named decided.
    """
    found = []
    for seed in seeds:
        snap = make(seed)
        if len(split(snap)) != 1 or max((n.gpus for n in snap.nodes), default=9) > 4:
            continue
        best = best_plan(snap)
        if not np.isfinite(best):
            continue
        plan = decide(snap)
        if solver in plan.solver:
            found.append(Compared(seed, plan, best))
    return found


def outside_the_gap(compared: list[Compared]) -> list[int]:
    """Return the seeds of wrong plans; there must be none.

    A plan is wrong if it is better than the best of all plans, or if its bound is below the best.
    """
    return [
        c.seed
        for c in compared
        if c.plan.objective > c.best + 1e-9 * abs(c.best) or c.plan.upper_bound < c.best - 1e-9 * abs(c.best)
    ]
