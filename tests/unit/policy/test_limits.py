"""Partitions, CPUs, and a job's own limits and counts.

Where no placement is possible, the reason says why.
"""

from __future__ import annotations

import math

import pytest

from pollux.goodput import BatchLimits
from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from polluxd.policy.shapes import available, stock
from tests.build import job, node, nodes, report, running, snapshot


def test_job_larger_than_the_cluster_is_infeasible_and_says_why():
    plan = decide(snapshot(nodes(4), [job(1, JobSpec(min_gpus=17)), job(2)]))
    assert not plan.of(1).placement
    assert "infeasible: min-gpus=17" in plan.of(1).reason
    assert "16 GPUs" in plan.of(1).reason
    assert plan.of(2).placement


def test_job_between_two_shapes_is_infeasible_and_says_why():
    plan = decide(snapshot(nodes(4), [job(1, JobSpec(min_gpus=5, max_gpus=7))]))
    assert not plan.of(1).placement
    assert "whole nodes" in plan.of(1).reason
    assert decide(snapshot(nodes(4), [job(1, JobSpec(min_gpus=5))])).of(1).placement.gpus == 8


def test_partitions_are_kept_apart():
    members = [*nodes(2), node("s0", partitions=frozenset({"side"}))]
    jobs = [job(1, partition="side", report=report()), job(2, report=report()), job(3, partition="nowhere")]
    plan = decide(snapshot(members, jobs))
    assert plan.of(1).placement == Placement(("s0",), 4)
    assert plan.of(2).placement == Placement(("n000", "n001"), 4)
    assert "no node of partition nowhere" in plan.of(3).reason


def test_cpus_limit_the_gpus_that_can_be_used():
    members = [node("n000", cpus=8), node("n001", cpus=8, foreign_cpus=6)]
    plan = decide(snapshot(members, [job(1, JobSpec(cpus_per_gpu=4), report=report())]))
    assert plan.of(1).placement == Placement(("n000",), 2)
    never = decide(snapshot(members, [job(1, JobSpec(min_gpus=4, cpus_per_gpu=4))]))
    assert "CPUs run out" in never.of(1).reason


def test_memory_limits_the_gpus_that_can_be_used():
    members = [node("n000", memory_mb=16000), node("n001", memory_mb=16000, foreign_memory_mb=12000)]
    hungry = JobSpec(mem_per_gpu_mb=6000)
    assert decide(snapshot(members, [job(1, hungry, report=report())])).of(1).placement == Placement(
        ("n000",), 2
    )
    never = decide(snapshot(members, [job(1, JobSpec(min_gpus=3, mem_per_gpu_mb=6000))]))
    assert "6000 MB of memory per GPU" in never.of(1).reason


@pytest.mark.parametrize("first", [0, 1])
def test_jobs_share_the_memory_of_a_node(first):
    members = [node("n000", memory_mb=10000)]
    held = [running(1, ["n000"], 1, JobSpec(mem_per_gpu_mb=4000), report=report())] if first else []
    jobs = [*held, *(job(i, JobSpec(mem_per_gpu_mb=4000), report=report()) for i in range(2, 5))]
    plan = decide(snapshot(members, jobs))
    assert sum(plan.of(j.job_id).placement.gpus for j in jobs) == 2


def test_running_job_whose_batch_limits_fit_nothing_is_left_alone_and_a_waiting_one_told():
    limits = BatchLimits(8, 8, 8, 8)
    jobs = [running(1, ["n000"], 4, report=report(limits=limits))]
    jobs += [job(2, JobSpec(min_gpus=2), report=report(limits=limits))]
    plan = decide(snapshot(nodes(1), jobs))
    assert plan.of(1).placement == Placement(("n000",), 1)
    assert not plan.of(2).placement
    assert "batch size would be at least 16" in plan.of(2).reason
    alone = [running(1, ["n000"], 4, JobSpec(min_gpus=2), report=report(limits=limits))]
    kept = decide(snapshot(nodes(1), alone)).of(1)
    assert not kept.changed
    assert "batch size" in kept.reason


@pytest.mark.parametrize(
    ("rule", "held"), [("any", 12), ("powers-of-two", 8), ("whole-nodes", 12), ("1,2,6,8", 8), ("3", 3)]
)
def test_gpu_counts_are_those_allowed(rule, held):
    alone = [job(1, JobSpec(gpu_counts=rule), report=report())]
    assert decide(snapshot(nodes(3), alone)).of(1).placement.gpus == held
    everybody = decide(snapshot(nodes(3), [job(1, report=report())], gpu_counts=rule))
    assert everybody.of(1).placement.gpus == held


def test_allowed_counts_far_apart_are_still_explored():
    small = [running(1, ["n000"], 1, JobSpec(gpu_counts="1,4,16"), report=report(explored=1))]
    assert decide(snapshot(nodes(4), small)).of(1).placement.gpus == 4


def test_gpu_counts_that_fit_no_node_are_infeasible():
    plan = decide(snapshot(nodes(2), [job(1, JobSpec(gpu_counts="5,7"))]))
    assert "gpu-counts=5,7" in plan.of(1).reason


def test_a_job_that_nodes_keep_below_its_limit_is_told_of_that_limit():
    """Six GPUs are allowed and measured; two nodes of four hold four or eight."""
    alone = [job(1, JobSpec(max_gpus=6), report=report(explored=3))]
    told = decide(snapshot(nodes(2), alone)).of(1)
    assert told.placement.gpus == 4
    assert "no placement of 5 to 6 GPUs is possible, and max-gpus=6 allows no more" in told.reason


@pytest.mark.parametrize(("cpus", "foreign", "most"), [(1, 0, 1), (3, 0, 3), (9, 7, 2), (8, 8, 0), (0, 0, 4)])
def test_a_node_offers_as_many_gpus_as_its_free_cpus_serve(cpus, foreign, most):
    """The job wants one CPU per GPU; without known CPUs, GPUs alone count."""
    offered = available(stock([node("n000", cpus=cpus, foreign_cpus=foreign)], JobSpec()), partial=False)
    assert [shape.gpus for shape in offered] == list(range(1, most + 1))


def test_parts_of_nodes_that_have_one_gpu_are_whole_nodes():
    alone = [job(1, report=report())]
    assert decide(snapshot(nodes(3, gpus=1), alone, partial_nodes=True)).of(1).placement.gpus == 3


@pytest.mark.parametrize("one_thread", [False, True])
@pytest.mark.parametrize("each", [1, 2, 3, 5])
@pytest.mark.parametrize("others", [0, 1, 4])
def test_jobs_share_the_whole_cores_of_a_node(one_thread, each, others):
    """As Slurm's select plugin counts: six cores of two threads, and no two jobs share a core."""
    members = [node("n000", cpus=12, foreign_cpus=others, cpus_per_core=2)]
    spec = JobSpec(cpus_per_gpu=each, one_thread=one_thread)
    jobs = [job(number, spec, report=report()) for number in (1, 2, 3)]
    plan = decide(snapshot(members, jobs))
    free = (12 - others) // 2

    def cores(gpus):
        return each * gpus if one_thread else math.ceil(each * gpus / 2)

    held = [plan.of(number).placement.gpus for number in (1, 2, 3)]
    assert sum(map(cores, held)) <= free
    for number in range(3):
        more = [gpus + (one == number) for one, gpus in enumerate(held)]
        assert sum(more) > 4 or sum(map(cores, more)) > free, "a GPU is left idle beside its cores"


def test_a_shrink_beside_another_job_counts_whole_cores():
    """Three GPUs of three CPUs need ten CPUs in whole cores, and the other job needs four: two remain."""
    members = [node("n000", cpus=12, cpus_per_core=2)]
    spec = JobSpec(cpus_per_gpu=3)
    grown = job(1, spec, report=report(), placement=Placement(("n000",), 4), started=True)
    plan = decide(snapshot(members, [grown, job(2, JobSpec(max_gpus=1, cpus_per_gpu=3))]))
    assert [plan.of(number).placement.gpus for number in (1, 2)] in ([2, 1], [4, 0])


@pytest.mark.parametrize(
    ("unit", "size", "most", "shapes"),
    [
        # A replica that fits a node lies on one node: 8 GPUs hold two of 4, 6 hold two of 3.
        (4, 8, 24, [(1, 4), (1, 8), (2, 8), (3, 8)]),
        (3, 8, 24, [(1, 3), (1, 6), (2, 6), (3, 6)]),
        # A larger one takes whole nodes.
        (16, 8, 40, [(2, 8), (4, 8)]),
        (12, 8, 48, [(3, 8), (6, 8)]),
        (64, 8, 512, [(8, 8), (16, 8), (24, 8), (32, 8), (40, 8), (48, 8), (56, 8), (64, 8)]),
        (1, 2, 4, [(1, 1), (1, 2), (2, 2)]),
    ],
)
def test_jobs_of_replicas_have_a_whole_number_of_them(unit, size, most, shapes):
    stocked = [(size, (most,) * (size + 1))]
    rules = (f"multiples-of-{unit}",)
    found = available(stocked, partial=True, highest=most, rules=rules)
    assert [(s.nodes, s.per_node) for s in found] == shapes


def test_replicas_grow_one_by_one_and_no_part_of_one_is_placed():
    spec = JobSpec(gpu_counts="multiples-of-8")
    for count, gpus in ((4, 16), (3, 8), (1, 0)):
        plan = decide(snapshot(nodes(count), [job(2, spec, report=report(explored=8))]))
        assert plan.of(2).placement.gpus == gpus
    assert "gpu-counts=multiples-of-8" in plan.of(2).reason


def test_a_trainer_that_nobody_knows_starts_on_its_users_size_or_the_largest_below():
    def start(size, count=2, **more):
        asked = job(1, JobSpec(own_size=size, **more))
        return decide(snapshot(nodes(count), [asked])).of(1)

    assert start(1).placement.gpus == 1, "although policy.start_gpus would be 4"
    assert start(3).placement.gpus == 3
    assert start(8).placement.gpus == 8
    assert start(6).placement.gpus == 4, "of two nodes, each whole, there are 4 or 8"
    assert start(8, max_gpus=2).placement.gpus == 2
    assert start(1, min_gpus=2).placement.gpus == 2
    assert start(3, gpu_counts="powers-of-two").placement.gpus == 2
    assert "the size that its user asked for" in start(1).reason
    assert "fair share" not in start(1).reason, "nothing is predicted of what was never measured"


def test_a_trainer_that_nobody_knows_waits_for_its_users_size():
    busy = running(2, ["n000"], 2, JobSpec(preemptible=False))
    waits = job(1, JobSpec(own_size=4))
    assert not decide(snapshot(nodes(1), [busy, waits])).of(1).placement
    fits = job(1, JobSpec(own_size=2))
    assert decide(snapshot(nodes(1), [busy, fits])).of(1).placement.gpus == 2


def test_a_size_at_which_the_trainer_did_not_start_is_told_with_its_last_line():
    barred = "its trainer did not start on 4 GPUs (status 1: cannot resume)"
    limits = BatchLimits(48, 48, 24, 48)
    said = report(explored=2, limits=limits, barred=barred, gpus=2)
    kept = decide(snapshot(nodes(2), [running(1, ["n000"], 2, JobSpec(adaptive=False), report=said)])).of(1)
    assert kept.placement.gpus == 2
    assert barred in kept.reason
