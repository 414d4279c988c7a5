"""Bad input: the policy uses the prior of a job that reports nonsense.

The plan's reason says so, and other jobs are not affected.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import NoiseScale
from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from tests.build import THETAS, job, nodes, report, running, snapshot
from tests.unit.policy.invariants import check

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("field", ["alpha_grad", "beta_grad", "alpha_local", "beta_node", "gamma"])
@pytest.mark.parametrize("value", [NAN, INF, -INF, -1.0, 1e9])
def test_a_job_whose_fit_cannot_be_falls_back_to_its_prior(field, value):
    bad = report(THETAS["scalable"]._replace(**{field: value}), explored=8)
    jobs = [job(1, report=bad), job(2, report=report("middling"))]
    plan = decide(snapshot(nodes(4), jobs))
    prior = decide(snapshot(nodes(4), [job(1, report=replace(bad, params=None, explored_gpus=0)), jobs[1]]))
    assert [a.placement for a in plan.allocations] == [a.placement for a in prior.allocations]
    assert plan.of(1).placement.gpus == 1
    assert f"its fit ({field}=" in plan.of(1).reason
    assert "unbelievable" not in plan.of(2).reason
    assert plan.objective == prior.objective


def test_a_running_job_whose_fit_broke_grows_no_further():
    bad = report(THETAS["scalable"]._replace(alpha_node=NAN), explored=4)
    plan = decide(snapshot(nodes(4), [running(1, ["n000"], 4, report=bad)]))
    assert plan.of(1).placement == Placement(("n000",), 4)
    assert "alpha_node=nan" in plan.of(1).reason


@pytest.mark.parametrize("noise", [NoiseScale(NAN, 1.0), NoiseScale(1.0, INF), NoiseScale(NAN, NAN)])
def test_a_noise_scale_that_cannot_be_counts_as_not_measured(noise):
    plan = decide(snapshot(nodes(2), [job(1, report=report(noise=noise))]))
    unknown = decide(snapshot(nodes(2), [job(1, report=report(noise=None))]))
    assert plan.of(1).batch_size == unknown.of(1).batch_size
    assert plan.objective == unknown.objective
    assert "its noise scale" in plan.of(1).reason


@pytest.mark.parametrize("field", ["weight", "age", "lost_seconds", "move_cost", "waiting"])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_times_and_weights_that_are_no_numbers_do_not_spread(field, value):
    jobs = [job(1, report=report(), started=True, **{field: value}), job(2, report=report("middling"))]
    snap = snapshot(nodes(3), jobs, starvation_bound=1000.0)
    plan = decide(snap)
    check(snap, plan)
    assert f"{field}={value}" in plan.of(1).reason
    assert all(a.placement for a in plan.allocations)
    assert plan.objective > 0


def test_remaining_work_that_is_no_number():
    jobs = [job(1, report=report(target=NAN)), job(2, report=report(target=100.0, progress=INF)), job(3)]
    snap = snapshot(nodes(2), jobs, remaining_work_power=-0.25)
    plan = decide(snap)
    check(snap, plan)
    assert "remaining work" in plan.of(1).reason
    assert "remaining work" in plan.of(2).reason
    assert plan.objective > 0


def test_sound_reports_are_not_touched():
    snap = snapshot(nodes(2), [job(1, report=report()), job(2)])
    assert "unbelievable" not in " ".join(a.reason for a in decide(snap).allocations)


def test_nothing_but_nonsense_still_gives_a_plan():
    theta = THETAS["scalable"]._replace(alpha_grad=NAN, gamma=-INF)
    jobs = [
        job(
            n,
            report=report(theta, noise=NoiseScale(NAN, -INF), target=NAN),
            age=NAN,
            weight=INF,
            lost_seconds=-INF,
        )
        for n in range(1, 9)
    ]
    for power in (-1.0, 1.0, 0.0, -10.0, -INF):
        snap = snapshot(nodes(1), jobs, power=power)
        plan = decide(snap)
        check(snap, plan)
        assert sum(a.placement.gpus for a in plan.allocations) == 4


def test_one_job_larger_than_the_cluster_takes_nothing_from_the_others():
    jobs = [job(1, JobSpec(min_gpus=1000), report=report()), job(2, report=report(explored=4))]
    plan = decide(snapshot(nodes(2), jobs))
    assert "infeasible" in plan.of(1).reason
    assert plan.of(2).placement.gpus == 8


def test_no_nodes_no_jobs_no_gpus():
    assert decide(snapshot([], [])).allocations == ()
    for members in ((), nodes(2, gpus=0)):
        plan = decide(snapshot(members, [job(1, report=report()), job(2)]))
        assert not any(a.placement for a in plan.allocations)
        assert all("infeasible" in a.reason for a in plan.allocations)
        assert plan.gap == 0


def test_claims_that_polluxd_does_not_believe_are_told_with_the_reason():
    doubted = job(1, report=report(), doubts=("faster than it trains", "too short"), doubted_reports=3)
    jobs = [doubted, replace(doubted, job_id=2, doubts=()), job(3, report=report())]
    plan = decide(snapshot(nodes(3), jobs))
    words = "polluxd does not believe these claims of its report"
    assert plan.of(1).reason.endswith(f"; {words}: faster than it trains, too short")
    assert plan.of(1).explanation.doubts == doubted.doubts
    assert plan.of(2).explanation.doubted_reports == 3
    assert all(words not in plan.of(n).reason for n in (2, 3))
