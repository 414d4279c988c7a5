"""Racks: who is given one, who several, and how it is told."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from pollux.goodput import Goodput
from polluxd.model import JobSpec, Placement
from polluxd.model.snapshot_json import decode_snapshot, encode
from polluxd.policy import Cache, decide
from tests.build import THETAS, job, node, report, running, snapshot
from tests.unit.policy.invariants import check
from tests.unit.policy.programs import without_racks
from tests.unit.policy.scenarios import applied, random_snapshot


def racked(*sizes, gpus=4):
    """Nodes r0n0, r0n1 ... r1n0 ...: so many in each rack."""
    return [node(f"r{r}n{i}", gpus, rack=f"r{r}") for r, count in enumerate(sizes) for i in range(count)]


def afar(kind="scalable", alpha=2.0, beta=0.1, **more):
    """Measured over racks, where it synchronises badly."""
    return report(THETAS[kind]._replace(alpha_rack=alpha, beta_rack=beta), **more)


def racks_used(plan, number):
    return {n[:2] for n in plan.of(number).placement.nodes}


EIGHT = JobSpec(min_gpus=8, max_gpus=8)


def test_a_job_of_two_nodes_is_given_one_rack():
    for found in (afar(), report()):
        busy = running(1, ["r0n0"], 4, JobSpec(min_gpus=4, max_gpus=4, preemptible=False), report=report())
        plan = decide(snapshot(racked(2, 2), [busy, job(2, EIGHT, report=found)]))
        assert plan.of(2).placement == Placement(("r1n0", "r1n1"), 4)
        assert plan.of(2).reason.endswith("; in rack r1")
        assert plan.of(2).explanation.racks == 1
        assert plan.gap < 1e-6


def test_over_racks_where_no_rack_has_the_room_and_what_one_would_bring():
    busy = [
        running(n, [f"r{n}n0"], 4, JobSpec(min_gpus=4, max_gpus=4, preemptible=False), report=report())
        for n in (0, 1)
    ]
    found = afar(alpha=0.2, beta=0.01)
    plan = decide(snapshot(racked(2, 2), [*busy, job(2, EIGHT, report=found)]))
    assert plan.of(2).placement == Placement(("r0n1", "r1n1"), 4)
    alone = Goodput(found.params, found.noise, found.limits)
    assert plan.of(2).goodput == pytest.approx(float(alone.optimize(2, 8, 2).goodput))
    assert plan.of(2).explanation.racks == 2
    more = 100 * (float(alone.optimize(2, 8, 1).goodput) / plan.of(2).goodput - 1)
    assert f"; over racks r0 and r1, where one rack would bring +{more:.0f} %" in plan.of(2).reason
    assert plan.gap < 1e-6


def test_a_job_that_synchronises_too_badly_over_racks_stays_within_one():
    """The job takes two of six nodes, because its racks hold two each.

    Over racks the job is slower than on two nodes, even when all nodes are free.
    """
    plan = decide(snapshot(racked(2, 2, 2), [job(1, report=afar(alpha=50.0))]))
    assert plan.solver == "integer program"
    assert len(plan.of(1).placement.nodes) == 2
    assert len(racks_used(plan, 1)) == 1
    free = decide(snapshot(racked(2, 2, 2), [job(1, report=report())]))
    assert len(free.of(1).placement.nodes) == 6


def test_the_job_that_minds_is_given_the_rack():
    """The job that is slow over racks gets the rack of two nodes.

    The racks have one, two and one nodes. The other job synchronises as well over racks, and takes both racks
    of one node.
    """
    spec = JobSpec(min_gpus=8, max_gpus=8)
    minds, does_not = job(1, spec, report=afar(alpha=5.0)), job(2, spec, report=afar(alpha=0.011, beta=0.001))
    plan = decide(snapshot(racked(1, 2, 1), [does_not, minds]))
    assert racks_used(plan, 1) == {"r1"}
    assert racks_used(plan, 2) == {"r0", "r2"}
    assert plan.gap < 1e-6


def test_a_job_moves_into_one_rack_once_that_pays_and_stays_there():
    spread = running(1, ["r0n0", "r1n0"], 4, EIGHT, report=afar(alpha=5.0))
    snap = snapshot(racked(2, 2), [spread])
    plan = decide(snap)
    assert len(racks_used(plan, 1)) == 1
    assert not decide(applied(snap, plan)).of(1).changed
    cheap = running(1, ["r0n0", "r1n0"], 4, EIGHT, report=afar(alpha=0.0105, beta=0.001))
    assert not decide(snapshot(racked(2, 2), [cheap])).of(1).changed


def test_one_rack_or_none_known_is_as_before():
    jobs = [job(1, report=report()), job(2, report=report("middling"))]
    same = [
        replace(j, report=replace(j.report, params=j.report.params._replace(alpha_rack=9.0, beta_rack=1.0)))
        for j in jobs
    ]
    bare = decide(snapshot([node(f"n{i}") for i in range(4)], jobs))
    for js in (jobs, same):
        for rack in ("", "r0"):
            assert decide(snapshot([node(f"n{i}", rack=rack) for i in range(4)], js)) == bare


def test_nodes_of_no_known_rack_count_as_one_more():
    members = [*racked(2), node("x0"), node("x1")]
    plan = decide(snapshot(members, [job(1, EIGHT, report=afar()), job(2, EIGHT, report=afar())]))
    assert {frozenset(plan.of(n).placement.nodes) for n in (1, 2)} == {
        frozenset({"r0n0", "r0n1"}),
        frozenset({"x0", "x1"}),
    }
    assert any(plan.of(n).reason.endswith("; in rack unknown") for n in (1, 2))


def random_racks(seed, **more):
    snap = random_snapshot(seed, **more)
    rng = np.random.default_rng(seed)
    members = tuple(
        replace(n, rack=f"r{rng.integers(0, 3)}", gpu_type="ab"[int(rng.integers(0, 2))]) for n in snap.nodes
    )
    jobs = []
    for j in snap.jobs:
        found = j.report
        if found is not None and found.params is not None and rng.random() < 0.7:
            fit = found.params._replace(alpha_rack=rng.uniform(0, 2), beta_rack=rng.uniform(0, 0.1))
            other = fit._replace(alpha_grad=fit.alpha_grad / rng.uniform(0.3, 4))
            found = replace(found, params=fit, params_by_type={"b": other} if seed % 2 else {})
        jobs.append(replace(j, report=found))
    return replace(snap, nodes=members, jobs=tuple(jobs))


@pytest.mark.slow
@pytest.mark.parametrize("power", [-1.0, 1.0, 0.0, -10.0, float("-inf")])
def test_random_clusters_of_racks_and_types_keep_every_rule_and_replay(power):
    for seed in range(20):
        snap = random_racks(seed, power=power, count=6)
        plan = decide(snap)
        check(snap, plan)
        assert plan == decide(snap, cache=Cache())
        stored = decode_snapshot(json.loads(json.dumps(encode(snap))))
        assert stored == snap
        assert decide(stored) == plan
        rack = {n.name: n.rack for n in snap.nodes}
        for a in plan.allocations:
            if a.explanation is not None and len(a.placement.nodes) > 1:
                assert a.explanation.racks == len({rack[n] for n in a.placement.nodes})


def test_a_goodput_is_that_of_the_racks_that_the_placement_lies_in():
    spans = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        found = [afar(alpha=rng.uniform(0.01, 0.1), beta=rng.uniform(0, 0.005)) for _ in range(1 + seed % 3)]
        plan = decide(snapshot(racked(2, 3, 2), [job(n, report=r) for n, r in enumerate(found)], power=1.0))
        for a in plan.allocations:
            if len(a.placement.nodes) > 1:
                own = found[a.job_id]
                spans.append(len(racks_used(plan, a.job_id)))
                function = Goodput(own.params, own.noise, own.limits)
                there = function.optimize(len(a.placement.nodes), a.placement.gpus, spans[-1])
                assert a.goodput == pytest.approx(float(there.goodput))
    assert {1, 3} <= set(spans)


def test_beyond_its_size_the_program_gives_way_to_prices_and_the_plan_stays_sound(monkeypatch):
    snap = snapshot(
        racked(4, 4, 4), [job(n, JobSpec(max_gpus=16), report=afar(alpha=0.5)) for n in range(1, 8)]
    )
    exact = decide(snap)
    without_racks(monkeypatch)
    plan = decide(snap)
    check(snap, plan)
    assert exact.solver == "integer program"
    assert plan.solver in ("price", "dynamic program")
    assert plan.objective <= exact.upper_bound * (1 + 1e-9)
    assert plan.objective >= 0.97 * exact.objective
    assert plan.upper_bound >= exact.objective * (1 - 1e-9)


def crowd(seed, jobs=25, racks=16):
    """Return racks of four nodes of eight GPUs, and competing jobs.

    Each job would use one or two racks for itself.
    """
    rng = np.random.default_rng(seed)
    found = []
    for n in range(jobs):
        near = THETAS["scalable"]._replace(
            beta_grad=rng.uniform(0.001, 0.004), beta_node=rng.uniform(1e-4, 1e-3)
        )
        own = near._replace(alpha_rack=0.01 * rng.uniform(1, 8), beta_rack=near.beta_node * rng.uniform(1, 8))
        found.append(job(n, report=report(own, explored=int(rng.choice([8, 32, 128])))))
    return snapshot(racked(*[4] * racks, gpus=8), found)


@pytest.mark.parametrize("seed", range(3))
def test_many_jobs_over_many_racks_end_near_a_certified_bound(seed, monkeypatch):
    snap = crowd(seed)
    plan = decide(snap)
    check(snap, plan)
    assert plan.solver == "integer program"
    assert plan.gap < 0.01
    assert any(len(a.placement.nodes) > 1 for a in plan.allocations)
    # Counts that know no racks promise too much: nobody is left without for that.
    without_racks(monkeypatch)
    priced = decide(snap)
    check(snap, priced)
    assert all(a.placement for a in priced.allocations)
    assert priced.objective <= plan.upper_bound * (1 + 1e-9)
    assert priced.upper_bound >= plan.objective * (1 - 1e-9)


def test_a_cache_from_before_racks_were_measured_changes_nothing():
    cache = Cache()
    members, others = racked(2, 2, 2), [job(n, report=report("middling")) for n in (2, 3)]
    for found in (report(), afar(alpha=50.0), afar(alpha=0.01), report(), afar(alpha=50.0)):
        snap = snapshot(members, [job(1, report=found), *others])
        assert decide(snap, cache=cache) == decide(snap)
