"""Impossible input, with one GPU type and several, with and without racks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import JobSpec
from polluxd.policy import decide
from polluxd.sim.policies.autoscale import desired_nodes
from tests.build import job, running, snapshot
from tests.unit.policy.unlike_nodes import KINDS, cluster, fitted


@KINDS
def test_limits_that_contradict_each_other_or_the_cluster_are_told(kind):
    asked = {
        JobSpec(min_gpus=8, max_gpus=4): "infeasible: max-gpus=4 is below min-gpus=8",
        JobSpec(min_gpus=25): "infeasible: min-gpus=25, but partition main could never give more than",
        JobSpec(min_gpus=5, max_gpus=7): "infeasible: no placement has between 5 and 7 GPUs",
        JobSpec(min_gpus=3, max_gpus=3, gpu_counts="powers-of-two"): "gpu-counts=powers-of-two allows",
    }
    jobs = [job(n, spec, report=fitted()) for n, spec in enumerate(asked, 1)]
    plan = decide(snapshot(cluster(kind), [*jobs, job(9, report=fitted())]))
    for a, words in zip(plan.allocations, asked.values(), strict=False):
        assert not a.placement
        assert words in a.reason
    assert plan.of(9).placement.gpus >= 4


@KINDS
def test_a_job_larger_than_any_rack_or_any_type_s_part(kind):
    """Twenty GPUs of one type are not there; over racks they are."""
    plan = decide(snapshot(cluster(kind), [job(1, JobSpec(min_gpus=20, max_gpus=20), report=fitted())]))
    assert plan.of(1).placement.gpus == (0 if "types" in kind else 20)
    if "types" in kind:
        assert plan.of(1).reason.startswith(("infeasible: ", "waits: "))


@KINDS
def test_zero_jobs_zero_nodes_and_nodes_that_have_nothing(kind):
    jobs = [job(1, report=fitted()), running(2, ["n0"], 2, report=fitted())]
    none = decide(snapshot(cluster(kind), []))
    assert (none.allocations, none.gap) == ((), 0.0)
    gone = decide(snapshot([], jobs))
    assert "infeasible: no node of partition main is known" in gone.of(1).reason
    for lost in (
        [replace(n, schedulable=False) for n in cluster(kind)],
        [replace(n, foreign_gpus=4) for n in cluster(kind)],
    ):
        plan = decide(snapshot(lost, jobs))
        assert not plan.of(1).placement
        assert plan.of(1).reason.startswith("waits: ")
        assert plan.gap < 1e-12
    assert desired_nodes(snapshot(cluster(kind), []), least=0, most=9).nodes == 0


@pytest.mark.slow
def test_ten_thousand_identical_jobs_of_whom_few_find_room():
    jobs = [job(n, report=fitted(explored=2)) for n in range(10_000)]
    plan = decide(snapshot(cluster("types and racks"), jobs))
    held = [a.placement.gpus for a in plan.allocations]
    assert sum(held) == 24
    assert max(held) == 1
    assert plan.gap < 0.01
