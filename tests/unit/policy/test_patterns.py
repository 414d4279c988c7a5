"""The bound by node patterns is above every plan, and near the best.

The bound stays near the best plan where counts promise GPUs that the nodes cannot provide.
"""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.model import JobSpec
from polluxd.policy import assignment, certificate, decide, patterns
from tests.unit.policy.every_plan import compared, outside_the_gap, small
from tests.unit.policy.scenarios import job, nodes, random_snapshot, report, running, snapshot


def test_every_way_to_cut_a_node():
    assert sorted(patterns.cuts(4)) == [(1, 1, 1, 1), (2, 1, 1), (2, 2), (3, 1), (4,)]
    assert list(patterns.cuts(0)) == [()]
    assert sum(1 for _ in patterns.cuts(patterns.LARGEST)) == 231


@pytest.fixture
def alone(monkeypatch):
    """Use the bound by patterns wherever a plan is not plainly the best."""
    monkeypatch.setattr(assignment, "MOST_PARTS", 0)
    monkeypatch.setattr(certificate, "CERTAIN", 0.0)


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
    monkeypatch.setattr(patterns, "MOST_OPTIONS", 0)
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
    monkeypatch.setattr(patterns, "MOST_OPTIONS", 0)
    assert decide(snap).upper_bound >= plan.upper_bound


@pytest.mark.usefixtures("alone")
def test_plans_are_the_same_and_bounds_never_looser(monkeypatch):
    snaps = [random_snapshot(seed, jobs=14, count=6, power=(-1.0, 0.0, 1.0)[seed % 3]) for seed in range(40)]
    with_it = [decide(snap) for snap in snaps]
    monkeypatch.setattr(patterns, "limit", lambda seating: np.inf)
    without = [decide(snap) for snap in snaps]
    assert [p.allocations for p in with_it] == [p.allocations for p in without]
    assert all(a.upper_bound <= b.upper_bound for a, b in zip(with_it, without, strict=True))
    assert sum(a.gap < b.gap - 1e-3 for a, b in zip(with_it, without, strict=True)) >= 3
