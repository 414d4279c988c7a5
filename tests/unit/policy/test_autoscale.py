"""The size of a cloud cluster follows its utility."""

from __future__ import annotations

import pytest

from polluxd.model import JobSpec
from polluxd.policy import decide
from polluxd.sim.policies.autoscale import HIGH, LOW, desired_nodes, utility
from tests.build import THETAS, job, node, nodes, report, running, snapshot


def stubborn(count):
    return [job(n, report=report("stubborn")) for n in range(1, count + 1)]


def test_utility_is_speedup_per_gpu():
    snap = snapshot(nodes(1), [job(1, JobSpec(max_gpus=1), report=report()), job(2, JobSpec(max_gpus=1))])
    assert utility(snap, decide(snap)) == pytest.approx(2 / 4)
    assert utility(snapshot([], []), decide(snapshot([], []))) == 0


def test_idle_nodes_are_given_back_and_crowded_clusters_grow():
    idle = desired_nodes(snapshot(nodes(16), stubborn(2)), least=1, most=32)
    assert 1 <= idle.nodes < 16
    assert idle.utility < LOW <= idle.expected <= HIGH
    assert "below" in idle.reason
    crowded = desired_nodes(
        snapshot(nodes(1), [job(n, report=report("scalable")) for n in range(1, 9)]), least=1, most=32
    )
    assert crowded.nodes > 1
    assert crowded.utility > HIGH
    assert abs(crowded.expected - 0.5) < abs(crowded.utility - 0.5)


def test_sizes_between_the_thresholds_stay():
    once = desired_nodes(snapshot(nodes(16), stubborn(2)), least=1, most=32)
    again = desired_nodes(snapshot(nodes(once.nodes), stubborn(2)), least=1, most=32)
    assert again.nodes == once.nodes
    assert "lies between" in again.reason


def test_limits_are_kept_and_no_job_needs_no_node():
    nobody = desired_nodes(snapshot(nodes(4), []), least=2, most=8)
    assert (nobody.nodes, nobody.utility, nobody.expected) == (2, 0.0, 0.0)
    none = desired_nodes(snapshot([], stubborn(2)), least=0, most=0, template=node("n"))
    assert (none.nodes, none.utility, none.expected) == (0, 0.0, 0.0)
    assert desired_nodes(snapshot(nodes(4), stubborn(1)), least=4, most=8).nodes == 4
    assert desired_nodes(snapshot([], stubborn(2)), least=0, most=8, template=node("n")).nodes >= 1
    with pytest.raises(ValueError, match="least"):
        desired_nodes(snapshot(nodes(1), stubborn(1)), least=3, most=2)
    with pytest.raises(ValueError, match="template"):
        desired_nodes(snapshot([], stubborn(1)), least=0, most=2)


def test_jobs_on_nodes_that_would_go_are_placed_anew():
    jobs = [running(1, ["n003"], 1, JobSpec(max_gpus=1), report=report())]
    assert desired_nodes(snapshot(nodes(8), jobs), least=1, most=8).nodes == 1


def test_what_was_tried_is_told_and_nodes_without_gpus_do_not_count():
    found = desired_nodes(snapshot([*nodes(16), node("login", 0)], stubborn(2)), least=1, most=32)
    assert dict(found.tried)[16] == found.utility
    assert dict(found.tried)[found.nodes] == found.expected
    assert found == desired_nodes(snapshot(nodes(16), stubborn(2)), least=1, most=32)


def test_a_job_is_compared_with_one_gpu_of_its_own_type():
    quick = THETAS["scalable"]._replace(alpha_grad=0.005, beta_grad=0.0002)
    spec = JobSpec(max_gpus=1)
    members = [node("a", 4, gpu_type="a100"), node("t", 4, gpu_type="t4")]
    snap = snapshot(members, [job(1, spec, report=report(params_by_type={"a100": quick}))])
    plan = decide(snap)
    assert plan.of(1).placement.nodes == ("a",)
    assert utility(snap, plan) == pytest.approx(1 / 8)
