"""The decision as a whole.

The tests check the invariants of every plan, and the allocations in plain cases.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from tests.build import job, node, nodes, report, running, snapshot
from tests.unit.policy.invariants import check
from tests.unit.policy.scenarios import applied, random_snapshot, snapshots
from tests.unit.policy.states import life


@pytest.mark.slow
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


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(snapshots)
def test_a_plan_carried_out_is_not_undone_unless_that_gains(snap):
    # A job that waited weighs less once it holds GPUs: the objectives of the two plans could not be compared.
    snap = replace(snap, settings=replace(snap.settings, waiting_power=0.0))
    first = decide(snap)
    after = applied(snap, first)
    second = decide(after)
    check(after, second)
    # Strongly negative powers order plans beyond what the fitness, a single number, shows.
    if snap.settings.power >= -2 and any(a.changed for a in second.allocations):
        moved_to_gain = [a for a in second.allocations if a.changed]
        assert second.objective > first.objective * (1 + 1e-12), moved_to_gain


def test_nothing_to_decide():
    empty = decide(snapshot([], []))
    assert (empty.allocations, empty.gap) == ((), 0)
    assert decide(snapshot(nodes(2), [])).allocations == ()
    no_nodes = decide(snapshot([], [job(1), running(2, ["gone"], 4)]))
    assert not no_nodes.of(1).placement
    assert "no node of partition main" in no_nodes.of(1).reason
    # Its node is unknown for now (a slurmctld that forgot?): it is not for the policy to end it.
    assert no_nodes.of(2).placement == Placement(("gone",), 4)


def test_an_unmeasured_job_starts_within_a_node_or_on_min_gpus():
    asked = [JobSpec(), JobSpec(adaptive=False), JobSpec(min_gpus=8), JobSpec(preemptible=False)]
    plan = decide(snapshot(nodes(4), [job(n, spec) for n, spec in enumerate(asked, 1)]))
    places = [a.placement for a in plan.allocations]
    assert [(len(place.nodes), place.gpus) for place in places] == [(1, 4), (1, 1), (2, 8), (1, 1)]
    assert "not measured yet, so at most 4 GPUs now" in plan.of(1).reason
    assert "not measured yet, so it begins with min-gpus=1" in plan.of(2).reason


@pytest.mark.parametrize(
    ("start", "size", "users", "gpus"),
    [(1, 4, 1, 1), (4, 2, 1, 2), (3, 8, 1, 3), (4, 4, 8, 2), (4, 4, 99, 1)],
)
def test_a_job_starts_with_no_more_than_its_users_equal_share_of_the_gpus(start, size, users, gpus):
    asked = [job(n, user=f"u{n}") for n in range(1, users + 1)]
    plan = decide(snapshot(nodes(16 // size, size), asked, start_gpus=start, objective="completion-time"))
    assert max(a.placement.gpus for a in plan.allocations) == gpus


@pytest.mark.parametrize(("other", "user", "gpus"), [(8, "bob", 4), (12, "bob", 1), (12, "eve", 4)])
def test_a_job_starts_on_min_gpus_where_smallest_sizes_take_three_quarters_of_the_gpus(other, user, gpus):
    plan = decide(snapshot(nodes(4), [job(1, user="bob"), job(2, JobSpec(other, other), user=user)]))
    assert [a.placement.gpus for a in plan.allocations] == [gpus, other]


def test_the_unmeasured_jobs_of_a_user_divide_the_users_share():
    many = [job(n, user="many") for n in range(1, 5)]
    one = job(5, user="one", report=report(explored=16))
    plan = decide(snapshot(nodes(4), [*many, one], objective="completion-time"))
    assert [plan.of(n).placement.gpus for n in range(1, 6)] == [2, 2, 2, 2, 8]


def test_an_unmeasured_job_starts_on_one_node_also_where_its_nodes_are_small():
    small = [replace(node, partitions=frozenset({"small"})) for node in nodes(2, 2)]
    large = [
        replace(node, name=f"large{node.name}", partitions=frozenset({"main", "small"}))
        for node in nodes(3, 8)
    ]
    busy = [replace(node, schedulable=False) for node in large]
    plan = decide(snapshot([*small, *busy], [job(1, partition="small")]))
    assert plan.of(1).placement == Placement(("n000",), 2)
    partial = decide(snapshot(nodes(2), [job(1)], partial_nodes=True))
    assert len(partial.of(1).placement.nodes) == 1


def test_a_report_without_a_measurement_leaves_the_start_as_it_is():
    said = replace(report(explored=0), params=None, gpus=4)
    plan = decide(
        snapshot(nodes(4), [running(1, ["n000"], 4, report=said), job(2)], objective="completion-time")
    )
    assert [plan.of(n).placement.gpus for n in (1, 2)] == [4, 4]
    assert "at most 4 GPUs now" in plan.of(1).reason


def test_what_was_measured_counts_before_what_a_start_may_have():
    plan = decide(snapshot(nodes(4), [job(1, report=replace(report(explored=1), params=None))]))
    assert plan.of(1).placement.gpus == 2


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
        running(3, ["n000"], 1, report=report(explored=10**9), age=-5.0, move_cost=-1.0, weight=0.0),
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


@pytest.mark.slow
def test_random_snapshots_end_within_a_small_gap():
    gaps = sorted(decide(random_snapshot(seed, jobs=12, count=6, power=-1.0)).gap for seed in range(60))
    assert gaps[len(gaps) // 2] < 0.02


def test_explanation_names_who_has_the_next_gpu():
    jobs = [job(1, report=report("scalable")), job(2, report=report("middling"))]
    plan = decide(snapshot(nodes(2), jobs))
    told = [a.explanation for a in plan.allocations]
    assert {e.limit for e in told} == {"contention"}
    assert told[0].taken_by == 2
    assert told[0].marginal <= told[0].price
    assert told[0].next_gpus > plan.of(1).placement.gpus
    assert (told[0].fair_gpus, told[0].fair_nodes) == (4, 1)
    assert "those of job 2 come closest" in plan.of(1).reason


def test_max_min_lifts_the_worst_off_job_of_a_cluster_with_room():
    max_min = PolicySettings(objective="fair-share", power=float("-inf"))
    gaps = [decide(state).gap for state in life(64, 20, 0, 3, decide, settings=max_min)]
    assert max(gaps) < 1e-3


def test_gpus_that_a_job_cannot_use_are_not_free_for_it():
    apart = replace(node("far"), partitions=frozenset({"other"}))
    few_cpus = node("m9", cpus=8, foreign_cpus=7)
    held = [running(i, (f"m{i}",), 3, JobSpec(min_gpus=3), pinned=True) for i in (0, 1)]
    both = job(8, partition="other,main", spec=JobSpec(min_gpus=1, max_gpus=1, adaptive=False))
    for least, limit in ((3, "fragmentation"), (4, "contention")):
        waits = job(7, spec=JobSpec(min_gpus=least, max_gpus=least))
        told = decide(snapshot((apart, node("m0"), node("m1"), few_cpus), [*held, both, waits])).of(7)
        assert told.explanation.limit == limit
        assert ("the 3 GPUs that are free for it" in told.reason) == (least == 3)
