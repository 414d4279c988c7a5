"""The whole plan against every plan there is, on clusters small enough to try them all."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from polluxd.model import Placement, Snapshot
from polluxd.policy import decide, fairness, objective
from polluxd.policy.domains import split
from polluxd.policy.menu import build
from polluxd.policy.packing import NOWHERE, Packing
from polluxd.policy.shapes import ANYWHERE, ONE_RACK
from tests.unit.policy.scenarios import random_snapshot

POWERS = (-1.0, 0.0, 1.0)


def every_seat(menu, packing, j):
    """All (option, seat) of a job, by its own rules alone."""
    if menu.pinned[j]:
        return [(int(menu.start[j]), packing.home[j])]
    spec, found = menu.jobs[j].spec, []
    for option in menu.options(j):
        shape = menu.shape(option)
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


def best_plan(snap: Snapshot) -> float:
    """The fitness of the best plan of one domain, by trying all."""
    (domain,) = split(snap)
    menu = build(domain, snap.settings, fairness.mean_weight(snap))
    packing = Packing(domain.nodes, menu.jobs, partial=snap.settings.partial_nodes, groups=menu.groups)
    best, jobs = -np.inf, len(menu.jobs)
    chosen = np.zeros(jobs, dtype=np.int64)

    def go(j: int) -> None:
        nonlocal best
        if j == jobs:
            moved = np.array([packing.moved(i) for i in range(jobs)], dtype=np.bool_)
            best = max(best, objective.fitness(menu.x(chosen, moved), menu.weight, snap.settings.power))
            return
        for option, seat in every_seat(menu, packing, j):
            held = len(seat[0]) * seat[1]
            free = menu.pinned[j] or seat == NOWHERE
            if not free and not (packing.fits(j, seat) and packing.within_ceilings(j, held)):
                continue
            mark = packing.mark()
            packing.put(j, seat)
            chosen[j] = option
            go(j + 1)
            packing.roll_back(mark)

    # Pinned jobs first: what they hold is taken before anybody chooses.
    order = sorted(range(jobs), key=lambda j: not menu.pinned[j])
    if order != list(range(jobs)):
        return np.nan
    go(0)
    return best


def small(seed: int) -> Snapshot:
    """A few jobs on at most three nodes, with partitions, foreign GPUs, ceilings; no guarantee, no starvation bound."""
    snap = random_snapshot(seed, jobs=1 + seed % 4, count=1 + seed % 3, power=POWERS[seed % 3])
    jobs = tuple(replace(j, pinned=False, spec=replace(j.spec, preemptible=True)) for j in snap.jobs)
    settings = replace(snap.settings, account_guarantees={}, starvation_bound=None)
    return replace(snap, jobs=jobs, settings=settings)


def with_types(snap: Snapshot, seed: int) -> Snapshot:
    """The same cluster with nodes of two GPU types, each job faster on one of them."""
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
    """The same cluster with its nodes in two or three racks, which most jobs tell apart; some hold nodes of two."""
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


@pytest.mark.parametrize("block", range(3))
def test_plan_over_racks_lies_within_its_gap_of_the_best_there_is(block):
    short, tried = [], 0
    for seed in range(block * 60, block * 60 + 60):
        snap = small(seed)
        snap = with_racks(
            random_snapshot(seed, jobs=1 + seed % 4, count=3 + seed % 2, power=snap.settings.power), seed
        )
        settings = replace(snap.settings, account_guarantees={}, starvation_bound=None)
        jobs = tuple(replace(j, pinned=False, spec=replace(j.spec, preemptible=True)) for j in snap.jobs)
        snap = replace(snap, settings=settings, jobs=jobs)
        if len(split(snap)) != 1 or max((n.gpus for n in snap.nodes), default=9) > 4:
            continue
        plan, best = decide(snap), best_plan(snap)
        if plan.solver != "integer program" or not np.isfinite(best):
            continue
        tried += 1
        assert plan.objective <= best * (1 + 1e-9), seed
        assert best <= plan.upper_bound * (1 + 1e-9), seed
        if plan.objective < best * (1 - 1e-6):
            short.append((seed, plan.objective / best))
    assert tried >= 10
    assert len(short) <= 0.05 * tried, short


@pytest.mark.parametrize("block", range(3))
def test_plan_over_two_gpu_types_lies_within_its_gap_of_the_best_there_is(block):
    short, tried = [], 0
    for seed in range(block * 80, block * 80 + 80):
        snap = with_types(small(seed), seed)
        if len(split(snap)) != 1 or max((n.gpus for n in snap.nodes), default=9) > 4:
            continue
        plan, best = decide(snap), best_plan(snap)
        if plan.solver != "integer program" or not np.isfinite(best):
            continue
        tried += 1
        assert plan.objective <= best * (1 + 1e-9), seed
        assert best <= plan.upper_bound * (1 + 1e-9), seed
        if plan.objective < best * (1 - 1e-6):
            short.append((seed, plan.objective / best))
    assert tried >= 10
    assert len(short) <= 0.05 * tried, short


@pytest.mark.parametrize("block", range(5))
def test_plan_lies_within_its_gap_of_the_best_there_is(block):
    short, tried = 0, 0
    for seed in range(block * 80, block * 80 + 80):
        snap = small(seed)
        if len(split(snap)) != 1 or max((n.gpus for n in snap.nodes), default=9) > 4:
            continue
        plan, best = decide(snap), best_plan(snap)
        if np.isnan(best) or not np.isfinite(best):
            continue
        tried += 1
        assert plan.objective <= best * (1 + 1e-9), seed
        assert best <= plan.upper_bound * (1 + 1e-9), seed
        short += plan.objective < best * (1 - 1e-6)
    assert tried >= 10
    assert short <= 0.05 * tried
