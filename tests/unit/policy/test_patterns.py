"""The program of node patterns, its bound and its plan.

The bound is above every plan, and the plan near the best. The program knows how nodes divide where counts promise GPUs
that no node can provide.
"""

from __future__ import annotations

import pytest

from polluxd.model import JobSpec
from polluxd.policy import decide, decision, patterns
from tests.build import THETAS, job, node, nodes, report, running, snapshot
from tests.unit.policy.every_plan import compared, outside_the_gap, small
from tests.unit.policy.invariants import check
from tests.unit.policy.programs import limit_assignment, without_patterns
from tests.unit.policy.scenarios import random_snapshot, seating_of


def test_every_way_to_cut_a_node():
    assert sorted(patterns.cuts(4)) == [(1, 1, 1, 1), (2, 1, 1), (2, 2), (3, 1), (4,)]
    assert list(patterns.cuts(0)) == [()]
    assert sum(1 for _ in patterns.cuts(patterns.LARGEST)) == 231


@pytest.fixture
def alone(monkeypatch):
    """Use patterns wherever a plan is not plainly the best."""
    limit_assignment(monkeypatch, 0)
    monkeypatch.setattr(decision, "CLOSE", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_no_plan_there_is_lies_above_it():
    found = compared(small, range(400))
    assert len(found) >= 200
    assert not outside_the_gap(found)
    assert sum(c.looseness > 0.01 for c in found) <= 0.1 * len(found)


def test_three_gpus_of_four_leave_one_that_nobody_can_use(monkeypatch):
    """64 nodes of four GPUs hold 64 jobs of three GPUs, not 85.

    A hundred such jobs wait. A count of GPUs would seat 85 of them.
    """
    jobs = [job(n, JobSpec(min_gpus=3, max_gpus=3), report=report()) for n in range(1, 101)]
    snap = snapshot(nodes(64), jobs)
    plan = decide(snap)
    assert sum(bool(a.placement) for a in plan.allocations) == 64
    assert plan.gap < 1e-6
    without_patterns(monkeypatch)
    counted = decide(snap)
    assert counted.allocations == plan.allocations
    assert counted.gap > 0.3


def test_pinned_jobs_and_ceilings_are_part_of_it(monkeypatch):
    jobs = [running(1, ["n000"], 2, report=report(), pinned=True)]
    jobs += [job(n, JobSpec(min_gpus=3, max_gpus=3), report=report(), account="big") for n in range(2, 120)]
    snap = snapshot(nodes(64), jobs, account_ceilings={"big": 100})
    plan = decide(snap)
    assert sum(bool(a.placement) for a in plan.allocations) == 1 + 33
    assert plan.gap < 0.02
    without_patterns(monkeypatch)
    assert decide(snap).upper_bound >= plan.upper_bound


@pytest.mark.usefixtures("alone")
def test_plans_are_never_worse_and_bounds_never_looser(monkeypatch):
    snaps = [random_snapshot(seed, jobs=14, count=6, power=(-1.0, 0.0, 1.0)[seed % 3]) for seed in range(40)]
    with_it = [decide(snap) for snap in snaps]
    without_patterns(monkeypatch)
    without = [decide(snap) for snap in snaps]
    for snap, a, b in zip(snaps, with_it, without, strict=True):
        check(snap, a)
        assert a.upper_bound <= b.upper_bound * (1 + 1e-9)
        assert a.objective >= b.objective * (1 - 1e-9)
    assert sum(a.gap < b.gap - 1e-3 for a, b in zip(with_it, without, strict=True)) >= 3
    assert sum(a.objective > b.objective * (1 + 1e-3) for a, b in zip(with_it, without, strict=True)) >= 2


def test_gpus_of_each_type_are_cut_by_themselves():
    """Two nodes of each type hold two jobs of three GPUs each."""
    members = [node(f"n00{i}", gpu_type="a100" if i < 2 else "t4") for i in range(4)]
    fits = {"a100": THETAS["scalable"], "t4": THETAS["middling"]}
    spec = JobSpec(min_gpus=3, max_gpus=3)
    jobs = [job(n, spec, report=report(params_by_type=fits)) for n in range(1, 5)]
    seating, _ = seating_of(members, jobs, power=1.0)
    chosen, bound = patterns.solve(seating, seating.table.pinned)
    table = seating.table
    assert [int(table.gpus[o]) for o in chosen] == [3, 3, 3, 3]
    assert sorted(table.types[table.kind[o]] for o in chosen) == ["a100", "a100", "t4", "t4"]
    assert bound == pytest.approx(sum(table.value[o] for o in chosen), rel=1e-4)


def test_jobs_that_stay_leave_their_nodes_to_no_other():
    """Two jobs of two GPUs stay on two nodes: a job of four has to wait."""
    jobs = [running(n, [f"n00{n}"], 2, report=report(), pinned=True) for n in (0, 1)]
    jobs.append(job(2, JobSpec(min_gpus=4, max_gpus=4), report=report()))
    seating, _ = seating_of(nodes(2), jobs, power=1.0)
    chosen, _ = patterns.solve(seating, seating.table.pinned)
    assert [int(seating.table.gpus[o]) for o in chosen] == [2, 2, 0]
