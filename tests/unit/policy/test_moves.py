"""The jobs that a plan moves.

No job moves without a gain, no pinned job moves, and all jobs leave nodes that go out of service.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.model import JobSpec, Placement
from polluxd.policy import decide
from tests.build import job, node, nodes, report, running, snapshot


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
        running(1, ["n000"], 4, report=report(), pinned=True, pin_reason="move in flight"),
        running(2, ["n001"], 1, JobSpec(preemptible=False), report=report()),
        job(3, report=report(), pinned=True, pin_reason="cooldown"),
    ]
    plan = decide(snapshot(drained, jobs))
    assert not any(a.changed for a in plan.allocations)
    assert "move in flight" in plan.of(1).reason
    assert "not preemptible" in plan.of(2).reason
    assert "cooldown" in plan.of(3).reason


def test_a_plan_without_explanations_is_the_same_plan():
    jobs = [running(1, ["n000"], 4, report=report()), job(2), job(3, report=report(), pinned=True)]
    told, silent = (decide(snapshot(nodes(3), jobs), explained=said) for said in (True, False))
    assert all(a.reason and a.explanation for a in told.allocations)
    assert not any(a.explanation for a in silent.allocations)
    unsaid = [replace(a, reason="", explanation=None) for a in told.allocations]
    assert [replace(a, reason="") for a in silent.allocations] == unsaid
    assert replace(silent, allocations=()) == replace(told, allocations=())


def test_jobs_leave_drained_nodes_and_shared_nodes_lend_what_others_left():
    members = [node("n000", schedulable=False), node("n001", foreign_gpus=3), node("n002")]
    plan = decide(snapshot(members, [running(1, ["n000"], 4, report=report()), job(2, JobSpec(max_gpus=1))]))
    assert plan.of(1).placement == Placement(("n002",), 4)
    assert plan.of(2).placement == Placement(("n001",), 1)


def test_dear_moves_are_not_made():
    def at(cost):
        jobs = [running(1, ["n000"], 1, report=report("middling", explored=1), age=300.0, move_cost=cost)]
        return decide(snapshot(nodes(1), jobs)).of(1)

    assert at(30.0).placement.gpus == 2
    assert at(3000.0).placement.gpus == 1
    assert "less than the move would cost" in at(3000.0).reason


def test_small_gains_do_not_flap():
    nearly_flat = ThroughputParams(0.5, 1e-5, 0.495, 0.0, 0.6, 0.0, 1.0)
    limits = BatchLimits(64, 64, 1, 64)
    slow = report(nearly_flat, limits=limits, noise=NoiseScale(1.0, 1.0))
    plan = decide(snapshot(nodes(1), [running(1, ["n000"], 1, report=slow, age=1e7, move_cost=1.0)]))
    assert not plan.of(1).changed


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


@pytest.mark.parametrize("objective", ["completion-time", "fair-share"])
def test_a_job_grows_in_place_where_it_would_not_be_requeued_to(objective):
    def grown(**more):
        left = report("scalable", explored=4, progress=0.0, target=2_000.0)
        own = running(1, ["n000"], 4, report=left, age=900.0, move_cost=1000.0, **more)
        return decide(snapshot(nodes(2), [own], objective=objective)).of(1)

    assert not grown().changed
    assert grown(resize_cost=1.0).placement == Placement(("n000", "n001"), 4)


def test_a_waiting_job_starts_on_idle_gpus_whatever_its_moves_have_cost():
    """The costs are differences of a clock, which may step."""
    waits = job(1, report=report(), age=700.0, started=True, moves=5, lost_seconds=7200.0, move_cost=1440.0)
    assert decide(snapshot(nodes(1), [waits])).of(1).placement
