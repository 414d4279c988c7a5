"""Limits and guarantees with GPU types and racks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from tests.build import job, node, running, snapshot
from tests.unit.policy.invariants import check
from tests.unit.policy.unlike_nodes import KINDS, THETA, cluster, fitted

CHEAP = THETA._replace(alpha_rack=0.012, beta_rack=0.001)
MIXED = pytest.mark.parametrize("kind", ["types", "racks", "types and racks"])


def held(plan, numbers):
    return sum(plan.of(n).placement.gpus for n in numbers)


@MIXED
def test_ceilings_and_guarantees_of_accounts_and_users(kind):
    jobs = [
        *(job(n, report=fitted(CHEAP), account="big", user="eve", weight=50.0) for n in (1, 2)),
        *(job(n, report=fitted(CHEAP), account="lab", user="ada") for n in (3, 4)),
    ]
    snap = snapshot(cluster(kind), jobs, account_ceilings={"big": 9}, user_guarantees={"ada": 12})
    plan = decide(snap)
    check(snap, plan)
    assert plan.solver == "integer program"
    assert 0 < held(plan, (1, 2)) <= 9
    assert held(plan, (3, 4)) >= 12
    if kind == "racks":
        assert "ceiling" in [plan.of(n).explanation.limit for n in (1, 2)]
        assert held(decide(snapshot(cluster(kind), jobs)), (1, 2)) > 9


@KINDS
def test_pinned_rigid_and_not_preemptible_jobs_drained_and_shared_nodes(kind):
    members = cluster(kind)
    members[1] = replace(members[1], schedulable=False)
    members[2] = replace(members[2], foreign_gpus=3)
    jobs = [
        running(1, ["n0"], 2, JobSpec(preemptible=False), report=fitted()),
        running(2, ["n1"], 4, report=fitted(), pinned=True, pin_reason="its move is under way"),
        running(3, ["n2"], 2, report=fitted()),
        job(4, JobSpec(min_gpus=4, max_gpus=4, adaptive=False), report=fitted()),
        job(5, JobSpec(gpu_counts="whole-nodes"), report=fitted()),
        job(6, JobSpec(gpu_counts="powers-of-two"), report=fitted()),
    ]
    snap = snapshot(members, jobs)
    plan = decide(snap)
    check(snap, plan)
    assert plan.of(1).placement == Placement(("n0",), 2)
    assert plan.of(2).placement == Placement(("n1",), 4)
    assert plan.of(3).placement != Placement(("n2",), 2), "a GPU of it is others' by now"
    assert plan.of(4).placement.gpus in (0, 4)
    assert plan.of(5).placement.gpus % 4 == 0
    assert plan.of(6).placement.gpus in (0, 1, 2, 4, 8, 16)
    assert held(plan, (3, 4, 5, 6)) >= 10


@MIXED
def test_partitions_are_kept_apart(kind):
    here, there = (
        cluster(kind),
        [replace(n, name=f"x{n.name}", partitions=frozenset({"side"})) for n in cluster(kind)],
    )
    jobs = [job(1, report=fitted()), job(2, report=fitted(), partition="side")]
    plan = decide(snapshot([*here, *there], jobs))
    assert all(n.startswith("n") for n in plan.of(1).placement.nodes)
    assert all(n.startswith("x") for n in plan.of(2).placement.nodes)
    alone = decide(snapshot(here, jobs[:1]))
    assert plan.of(1).placement == alone.of(1).placement


@pytest.mark.parametrize("power", [1.0, 0.0, -1.0, -10.0, float("-inf")])
def test_every_power_over_types_and_racks_is_certified_and_low_ones_raise_the_worst_off(power):
    thetas = [
        THETA._replace(beta_grad=b, alpha_rack=a) for b, a in ((0.001, 0.02), (0.002, 0.5), (0.004, 0.1))
    ]
    jobs = [job(n, report=fitted(theta)) for n, theta in enumerate(thetas * 2, 1)]
    worst = {}
    for p in (power, 1.0):
        snap = snapshot(cluster("types and racks", 8), jobs, power=p)
        plan = decide(snap)
        check(snap, plan)
        assert plan.objective <= plan.upper_bound
        assert plan.gap < (0.15 if p > float("-inf") else 0.25)
        worst[p] = min(a.speedup for a in plan.allocations)
    assert worst[power] >= worst[1.0] * (1 - 1e-9)


def test_one_multi_node_job_at_most_on_a_node_with_partial_nodes_over_racks():
    members = [node(f"n{i}", rack=f"r{i // 2}") for i in range(6)]
    jobs = [job(n, JobSpec(min_gpus=6, max_gpus=6), report=fitted()) for n in range(1, 5)]
    snap = snapshot(members, jobs, partial_nodes=True)
    plan = decide(snap)
    check(snap, plan)
    assert held(plan, range(1, 5)) >= 18
