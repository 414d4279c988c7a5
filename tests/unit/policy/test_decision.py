"""What every decision must hold, whatever the cluster looks like."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from polluxd.policy.feasible import is_pinned
from polluxd.policy.shapes import Shape, allows
from tests.unit.policy.scenarios import (
    applied,
    job,
    node,
    nodes,
    random_snapshot,
    report,
    running,
    snapshot,
    snapshots,
)


def check(snap, plan):
    """Capacity, partitions, limits and interference of a plan; jobs that it leaves alone are taken as they are."""
    by_name = {n.name: n for n in snap.nodes}
    assert [a.job_id for a in plan.allocations] == sorted(j.job_id for j in snap.jobs)
    used, spans = Counter(), Counter()
    for j in snap.jobs:
        a = plan.of(j.job_id)
        assert a.changed == (a.placement != j.placement)
        assert a.reason
        if is_pinned(j):
            assert a.placement == j.placement
        for name in a.placement.nodes:
            used[name] += a.placement.gpus_per_node
            spans[name] += len(a.placement.nodes) > 1 and a.changed
            if a.changed:
                n = by_name[name]
                assert n.schedulable
                assert not n.partitions.isdisjoint(j.partition.split(","))
                assert len(a.placement.nodes) == 1 or (
                    snap.settings.partial_nodes or a.placement.gpus_per_node == n.gpus
                )
        if a.placement and a.changed:
            assert a.placement.gpus >= j.spec.min_gpus
            assert a.placement.gpus <= (j.spec.max_gpus or 10**9)
            whole = a.placement.gpus_per_node == by_name[a.placement.nodes[0]].gpus
            shape = Shape(len(a.placement.nodes), a.placement.gpus_per_node)
            if a.placement.gpus != j.placement.gpus:
                assert allows(snap.settings.gpu_counts, shape, whole=whole)
                assert allows(j.spec.gpu_counts, shape, whole=whole)
            if j.report is not None and j.report.params is not None:
                assert a.goodput > 0
                assert a.batch_size > 0
    for name, gpus in used.items():
        fixed = sum(
            j.placement.gpus_per_node
            for j in snap.jobs
            if name in j.placement.nodes and not plan.of(j.job_id).changed
        )
        # Jobs left where they are may sit on a node that went out of service under them.
        assert gpus <= max(by_name[name].capacity, fixed)
        assert spans[name] <= 1
    for kind, ceilings in (
        ("account", snap.settings.account_ceilings),
        ("user", snap.settings.user_ceilings),
    ):
        for name, ceiling in ceilings.items():
            own = [j for j in snap.jobs if getattr(j, kind) == name]
            fixed = sum(j.placement.gpus for j in own if is_pinned(j) or not plan.of(j.job_id).changed)
            assert sum(plan.of(j.job_id).placement.gpus for j in own) <= max(ceiling, fixed)
    assert plan.objective <= plan.upper_bound * (1 + 1e-9)
    assert 0 <= plan.gap < 1


@settings(max_examples=300, deadline=None)
@given(snapshots)
def test_plan_keeps_capacity_limits_partitions_and_interference(snap):
    check(snap, decide(snap))


@settings(max_examples=60, deadline=None)
@given(snapshots)
def test_plan_is_the_same_whatever_the_order_of_nodes_and_jobs(snap):
    rng = random.Random(7)
    shuffled = replace(
        snap,
        nodes=tuple(rng.sample(snap.nodes, len(snap.nodes))),
        jobs=tuple(rng.sample(snap.jobs, len(snap.jobs))),
    )
    assert decide(snap) == decide(snap) == decide(shuffled)


@settings(max_examples=100, deadline=None)
@given(snapshots)
def test_a_plan_carried_out_is_not_undone_unless_that_gains(snap):
    first = decide(snap)
    after = applied(snap, first)
    second = decide(after)
    check(after, second)
    # Strongly negative powers and the starvation bound order plans beyond what the fitness, a single number, shows.
    plain = snap.settings.power >= -2 and snap.settings.starvation_bound is None
    if plain and any(a.changed for a in second.allocations):
        moved_to_gain = [a for a in second.allocations if a.changed]
        assert second.objective > first.objective * (1 + 1e-12), moved_to_gain


def test_nothing_to_decide():
    empty = decide(snapshot([], []))
    assert empty.allocations == ()
    assert empty.gap == 0
    idle = decide(snapshot(nodes(2), []))
    assert idle.allocations == ()
    no_nodes = decide(snapshot([], [job(1), running(2, ["gone"], 4)]))
    assert not no_nodes.of(1).placement
    assert "no node of partition main" in no_nodes.of(1).reason
    # Its node is unknown for now (a slurmctld that forgot?): it is not for the policy to end it.
    assert no_nodes.of(2).placement == Placement(("gone",), 4)


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


def test_unmeasured_jobs_start_on_min_gpus():
    plan = decide(snapshot(nodes(4), [job(1), job(2, JobSpec(min_gpus=3)), job(3, JobSpec(min_gpus=8))]))
    assert [plan.of(n).placement.gpus for n in (1, 2, 3)] == [1, 3, 8]
    assert "not measured yet" in plan.of(1).reason


def test_exploration_is_capped_at_twice_what_was_measured():
    plan = decide(snapshot(nodes(4), [running(1, ["n000"], 2, report=report(explored=2))]))
    assert plan.of(1).placement == Placement(("n000",), 4)
    assert "grows from 2 to 4" in plan.of(1).reason
    assert "measured on at most 2 GPUs" in plan.of(1).reason


def test_a_scalable_job_takes_the_idle_cluster_and_a_stubborn_one_does_not():
    alone = decide(snapshot(nodes(4), [job(1, report=report("scalable"))]))
    assert alone.of(1).placement.gpus == 16
    both = decide(snapshot(nodes(4), [job(1, report=report("scalable")), job(2, report=report("stubborn"))]))
    assert both.of(1).placement.gpus > both.of(2).placement.gpus
    assert both.of(2).placement
    assert "would not raise its goodput" in both.of(2).reason


def test_more_jobs_than_gpus_leave_some_waiting_and_none_above_capacity():
    plan = decide(snapshot(nodes(2), [job(n, report=report()) for n in range(1, 21)]))
    assert sum(a.placement.gpus for a in plan.allocations) == 8
    assert sum(bool(a.placement) for a in plan.allocations) == 8
    assert "waits" in next(a.reason for a in plan.allocations if not a.placement)


def test_a_job_whose_count_stays_keeps_its_nodes_while_others_come_and_go():
    before = [running(1, ["n001"], 2, JobSpec(max_gpus=2), report=report())]
    before += [running(2, ["n000"], 4, JobSpec(max_gpus=4), report=report())]
    plan = decide(snapshot(nodes(3), [*before, job(3, JobSpec(max_gpus=1))]))
    assert not plan.of(1).changed
    assert not plan.of(2).changed
    assert plan.of(3).placement


def test_pinned_and_not_preemptible_jobs_keep_theirs_even_on_a_drained_node():
    drained = [node("n000", schedulable=False), node("n001")]
    jobs = [
        running(1, ["n000"], 4, report=report(), pinned=True, pin_reason="re-allocation in flight"),
        running(2, ["n001"], 1, JobSpec(preemptible=False), report=report()),
        job(3, report=report(), pinned=True, pin_reason="cooldown"),
    ]
    plan = decide(snapshot(drained, jobs))
    assert not any(a.changed for a in plan.allocations)
    assert "re-allocation in flight" in plan.of(1).reason
    assert "not preemptible" in plan.of(2).reason
    assert "cooldown" in plan.of(3).reason


def test_jobs_leave_drained_nodes_and_shared_nodes_lend_what_others_left():
    members = [node("n000", schedulable=False), node("n001", foreign_gpus=3), node("n002")]
    plan = decide(snapshot(members, [running(1, ["n000"], 4, report=report()), job(2, JobSpec(max_gpus=1))]))
    assert plan.of(1).placement == Placement(("n002",), 4)
    assert plan.of(2).placement == Placement(("n001",), 1)


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


@pytest.mark.parametrize(
    "weights",
    [
        {"account_weights": {"big": 4.0}},
        {"user_weights": {"eve": 4.0}},
        {"qos_weights": {"high": 4.0}},
        {"job_weights": {"1": 4.0}},
        {"account_weights": {"big": 8.0}, "qos_weights": {"high": 2.0}, "user_weights": {"ada": 4.0}},
    ],
)
def test_weights_shift_the_shares(weights):
    jobs = [
        job(1, report=report(), account="big", user="eve", qos="high"),
        job(2, report=report(), account="lab", user="ada", qos="normal"),
    ]
    even = decide(snapshot(nodes(4), jobs))
    uneven = decide(snapshot(nodes(4), jobs, **weights))
    assert uneven.of(1).explanation.weight == 4 * uneven.of(2).explanation.weight
    assert even.of(1).placement.gpus == even.of(2).placement.gpus == 8
    assert uneven.of(1).placement.gpus > uneven.of(2).placement.gpus > 0


@pytest.mark.parametrize("power", [1.0, 0.0, -1.0, -2.0, -10.0, -100.0, float("-inf")])
def test_every_power_gives_a_plan_and_low_powers_raise_the_worst_off(power):
    jobs = [job(n, report=report(kind)) for n, kind in enumerate(["scalable", "middling", "stubborn"] * 3, 1)]
    snap = snapshot(nodes(4), jobs, power=power)
    plan = decide(snap)
    check(snap, plan)
    worst = min(a.speedup for a in plan.allocations)
    best_worst = min(a.speedup for a in decide(snapshot(nodes(4), jobs, power=float("-inf"))).allocations)
    assert worst <= best_worst * (1 + 1e-9)
    if power < -5:
        assert worst >= 0.9 * best_worst


def test_starved_jobs_come_first_under_strongly_negative_powers():
    jobs = [running(1, ["n000", "n001"], 4, report=report()), *(job(n, report=report()) for n in range(2, 6))]
    plan = decide(snapshot(nodes(2), jobs, power=-10.0))
    assert all(a.placement for a in plan.allocations)


def test_dear_moves_are_not_made():
    def at(cost):
        jobs = [
            running(1, ["n000"], 1, report=report("middling", explored=1), age=300.0, reallocation_cost=cost)
        ]
        return decide(snapshot(nodes(1), jobs)).of(1)

    assert at(30.0).placement.gpus == 2
    assert at(3000.0).placement.gpus == 1
    assert "less than another move would cost" in at(3000.0).reason


def test_small_gains_do_not_flap():
    nearly_flat = ThroughputParams(0.5, 1e-5, 0.495, 0.0, 0.6, 0.0, 1.0)
    limits = BatchLimits(64, 64, 1, 64)
    slow = report(nearly_flat, limits=limits, noise=NoiseScale(1.0, 1.0))
    plan = decide(snapshot(nodes(1), [running(1, ["n000"], 1, report=slow, age=1e7, reallocation_cost=1.0)]))
    assert not plan.of(1).changed


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


def test_identical_jobs_share_alike_and_ties_go_by_job_id():
    plan = decide(snapshot(nodes(4), [job(n, report=report()) for n in range(1, 9)]))
    assert {a.placement.gpus for a in plan.allocations} == {2}
    odd = decide(snapshot(nodes(1), [job(n, report=report()) for n in range(1, 7)]))
    assert sum(bool(a.placement) for a in odd.allocations) == 4


def test_absurd_but_finite_values_do_not_crash():
    strange = ThroughputParams(1e-8, 1e-8, 1e300, 1e300, 1e-300, 0.0, 10.0)
    jobs = [
        job(1, report=report(strange, noise=NoiseScale(1e300, 1e-300))),
        job(2, report=report(noise=NoiseScale(0.0, 0.0)), age=0.0, lost_seconds=1e12),
        running(3, ["n000"], 1, report=report(explored=10**9), age=-5.0, reallocation_cost=-1.0, weight=0.0),
        job(
            4,
            JobSpec(min_gpus=1, max_gpus=10**9, cpus_per_gpu=0),
            report=report(limits=BatchLimits(1, 10**9, 1, 1)),
        ),
        job(5, weight=1e12),
    ]
    for power in (-1.0, 1.0, -10.0):
        snap = snapshot(nodes(3), jobs, power=power)
        check(snap, decide(snap))


def test_two_spanning_jobs_never_share_a_node_with_partial_nodes():
    jobs = [job(n, JobSpec(min_gpus=6), report=report()) for n in (1, 2)]
    plan = decide(snapshot(nodes(3), jobs, partial_nodes=True))
    placed = [a for a in plan.allocations if a.placement]
    assert len(placed) == 1
    four = decide(snapshot(nodes(4), jobs, partial_nodes=True))
    assert all(a.placement for a in four.allocations)


def test_a_whole_node_is_cleared_for_a_job_that_needs_one():
    jobs = [
        running(1, ["n000"], 1, JobSpec(max_gpus=1), report=report()),
        running(2, ["n001"], 1, JobSpec(max_gpus=1), report=report()),
        job(3, JobSpec(min_gpus=4), report=report(explored=4)),
    ]
    plan = decide(snapshot(nodes(2), jobs))
    assert plan.of(3).placement.gpus == 4
    assert plan.of(1).placement
    assert plan.of(2).placement
    assert sum(plan.of(n).changed for n in (1, 2)) == 1


def test_random_snapshots_end_within_a_small_gap():
    gaps = sorted(decide(random_snapshot(seed, jobs=12, count=6, power=-1.0)).gap for seed in range(60))
    assert gaps[len(gaps) // 2] < 0.02


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


def test_starvation_bound_puts_those_who_waited_longest_first():
    jobs = [running(n, ["n000"], 1, report=report("scalable", explored=1)) for n in range(1, 5)]
    jobs += [job(5, JobSpec(min_gpus=4), report=report("stubborn", explored=4), age=7200.0)]
    jobs += [job(6, report=report(), age=50.0)]
    patient = decide(snapshot(nodes(1), jobs))
    assert not patient.of(5).placement
    bounded = decide(snapshot(nodes(1), jobs, starvation_bound=3600.0))
    assert bounded.of(5).placement.gpus == 4
    assert not decide(snapshot(nodes(1), jobs, starvation_bound=86400.0)).of(5).placement
    assert 0 <= bounded.gap < 1


def test_every_job_has_run_within_the_starvation_bound_and_the_time_to_drain_the_queue():
    """Twelve jobs, none of which ever ends, on four GPUs: each gets its turn."""
    queue = [job(n, report=report(explored=1), age=0.0) for n in range(1, 13)]
    snap, longest = snapshot(nodes(1), queue, starvation_bound=600.0), 0.0
    waits = {j.job_id: 0.0 for j in snap.jobs}
    for _ in range(60):
        plan = decide(snap)
        for a in plan.allocations:
            waits[a.job_id] = 0.0 if a.placement else waits[a.job_id] + 60.0
        longest = max(longest, *waits.values())
        snap = applied(snap, plan)
        snap = replace(
            snap, jobs=tuple(replace(j, age=j.age + 60, waiting=waits[j.job_id]) for j in snap.jobs)
        )
    assert longest <= 600 + 2 * 60 + 600


def test_remaining_work_favours_the_job_near_its_end_within_bounds():
    def at(power):
        jobs = [
            job(1, report=report(progress=9900.0, target=10000.0)),
            job(2, report=report(progress=0.0, target=10000.0)),
        ]
        plan = decide(snapshot(nodes(4), jobs, remaining_work_power=power))
        return plan.of(1).placement.gpus, plan.of(2).placement.gpus

    assert at(0.0) == (8, 8)
    near, far = at(-0.25)
    assert near > far > 0


def test_explanation_names_who_has_the_next_gpu():
    jobs = [job(1, report=report("scalable")), job(2, report=report("middling"))]
    plan = decide(snapshot(nodes(2), jobs))
    told = [a.explanation for a in plan.allocations]
    assert {e.limit for e in told} == {"contention"}
    assert told[0].taken_by == 2
    assert told[0].marginal <= told[0].price
    assert told[0].next_gpus > plan.of(1).placement.gpus
    assert (told[0].fair_gpus, told[0].fair_nodes) == (4, 1)
    assert "those of job 2 the least" in plan.of(1).reason
