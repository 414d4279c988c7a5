"""The program over nodes on small, tight clusters.

The program tightens the bound, improves the plan, and breaks no rule.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polluxd.model import JobSpec
from polluxd.policy import assignment, decide
from polluxd.policy.choice import choose
from polluxd.policy.domains import split
from polluxd.policy.integer import EQUAL
from polluxd.policy.option_table import build
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating
from tests.build import job, node, nodes, report, running, snapshot
from tests.unit.policy.invariants import check
from tests.unit.policy.programs import limit_assignment, without_patterns
from tests.unit.policy.scenarios import options_of, random_snapshot, seating_of


def without(snap, most_parts=0):
    """Decide without patterns, and with `most_parts` variables at most."""
    with pytest.MonkeyPatch.context() as patch:
        limit_assignment(patch, most_parts)
        without_patterns(patch)
        return decide(snap)


@pytest.mark.slow
@pytest.mark.parametrize("power", [-1.0, 0.0, 1.0])
def test_plan_is_no_worse_and_its_bound_no_looser_than_without(power):
    tighter = 0
    for seed in range(40):
        snap = random_snapshot(seed, jobs=8, count=3, power=power)
        # Weights of jobs that wait would park others, and then the rule of starts chooses between plans.
        snap = replace(snap, settings=replace(snap.settings, waiting_power=0.0))
        plan, plain = decide(snap), without(snap)
        check(snap, plan)
        assert plan == decide(snap)
        assert plan.upper_bound <= plain.upper_bound * (1 + 1e-9)
        assert plan.objective >= plain.objective * (1 - 1e-9)
        tighter += plan.gap < plain.gap - 1e-6
    assert tighter >= 3


def test_tight_clusters_end_near_a_certified_bound():
    gaps = sorted(decide(random_snapshot(seed, jobs=8, count=3, power=-1.0)).gap for seed in range(60))
    assert gaps[53] < 0.01


def test_jobs_that_no_node_can_hold_together_do_not_count_as_possible():
    """Three jobs of three GPUs need three nodes of four GPUs.

    Only one such job fits on a node. A count of GPUs would seat a fourth job in the twelve GPUs.
    """
    jobs = [job(n, JobSpec(min_gpus=3, max_gpus=3), report=report()) for n in range(1, 5)]
    snap = snapshot(nodes(3), jobs)
    assert without(snap).gap > 0.1
    plan = decide(snap)
    assert sum(bool(a.placement) for a in plan.allocations) == 3
    assert plan.gap < 1e-3


def test_a_program_of_exactly_the_most_variables_is_solved():
    """Each of four jobs has four variables: one per node, and nothing."""
    jobs = [job(n, JobSpec(min_gpus=3, max_gpus=3), report=report()) for n in range(1, 5)]
    snap = snapshot(nodes(3), jobs)
    assert without(snap, most_parts=15).gap > 0.1
    assert without(snap, most_parts=16).gap < 1e-3


def test_a_job_over_several_nodes_that_gives_way_counts_as_moved():
    """Only the first node is open to the second job.

    The first job waits, moves to other nodes, or keeps it waiting.
    """
    members = [node("n000", partitions=frozenset({"main", "side"})), *nodes(3)[1:]]
    eight, four = JobSpec(min_gpus=8, max_gpus=8), JobSpec(min_gpus=4, max_gpus=4)
    jobs = [
        running(1, ["n000", "n001"], 4, eight, report=report(), move_cost=600.0),
        job(2, four, report=report(), partition="side"),
    ]
    seating, _ = seating_of(members, jobs, power=1.0)
    stay, nothing = (int(options_of(seating, gpus, 0)[0]) for gpus in (8, 0))
    start = int(options_of(seating, 8, 4)[1])
    waits = int(options_of(seating, 8, 0)[1])
    best = max(
        seating.stay[stay] + seating.move[waits],
        seating.move[stay] + seating.move[start],
        seating.move[nothing] + seating.move[start],
    )
    assert best < seating.stay[stay] + seating.move[start] - 0.01
    assert assignment.limit(seating) == pytest.approx(best, rel=1e-4)


def test_a_program_among_few_options_finds_what_one_among_all_finds():
    compared = 0
    for seed in range(20):
        snap = random_snapshot(seed, jobs=8, count=3, power=-1.0)
        for domain in split(snap):
            table = build(domain, snap.settings)
            if not table.jobs:
                continue
            packing = Packing(
                domain.nodes, table.jobs, partial=snap.settings.partial_nodes, groups=table.groups
            )
            seating = Seating(table, packing)
            chosen = choose(table, domain, packing, -1.0)
            seating.settle(seating.fill(chosen.chosen), chosen.chosen)
            few = seating.among(chosen.reach)
            everything, some = assignment.limit(seating), assignment.limit(few)
            if few.slack is None or not np.isfinite(everything):
                continue
            compared += bool(np.any(few.slack < 0))
            total, tolerance = seating.total(), 2 * EQUAL * float(np.abs(table.value).max())
            assert max(some, total) == pytest.approx(max(everything, total), rel=1e-5, abs=tolerance)
    assert compared >= 10


def test_the_bound_counts_only_the_group_s_own_jobs_towards_its_ceiling():
    """Ada may hold one GPU: one of her two jobs waits, and Bob's two run."""
    spec = JobSpec(max_gpus=1)
    jobs = [job(n, spec, report=report(), user=user) for n, user in enumerate(["ada", "ada", "bob", "bob"])]
    seating, _ = seating_of(nodes(1), jobs, user_ceilings={"ada": 1}, power=1.0)
    nothing, one = (seating.move[int(options_of(seating, gpus, 1, 1, 1)[0])] for gpus in (0, 1))
    assert assignment.limit(seating) == pytest.approx(3 * one + nothing, rel=1e-4)
