"""Packing, seating and the program over nodes, each by itself."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.model import JobSpec
from polluxd.policy import assignment, choice, objective
from polluxd.policy.domains import NOWHERE
from polluxd.policy.packing import Packing
from tests.build import job, node, nodes, report, running
from tests.unit.policy.programs import limit_assignment
from tests.unit.policy.scenarios import options_of, seating_of


def test_spare_gpus_are_those_that_are_free_on_any_node():
    packing = Packing(nodes(2), [job(1), job(2)], partial=False)
    for j, seat in [(0, ((0,), 3)), (1, ((0, 1), 2)), (0, NOWHERE), (1, ((1,), 4)), (1, NOWHERE)]:
        packing.put(j, seat)
        assert packing.spare == np.maximum(packing.free, 0).sum()
    assert packing.spare == 8


def test_jobs_are_seated_at_home_all_at_once_or_none():
    jobs = [running(1, ["n000"], 3), running(2, ["n000"], 2), running(3, ["n001"], 4)]
    packing = Packing(nodes(2), jobs, partial=False)
    assert packing.seat_at_home([])
    assert not packing.seat_at_home([0, 1, 2])
    assert packing.seats == [NOWHERE] * 3
    assert packing.seat_at_home([0, 2])
    assert packing.seats == [((0,), 3), NOWHERE, ((1,), 4)]


def test_jobs_stay_one_by_one_where_not_all_can():
    """Two jobs share a node that one GPU of another job has come to."""
    members = [node("n000", 4, foreign_gpus=1), node("n001", 4)]
    jobs = [running(1, ["n000"], 2, report=report()), running(2, ["n000"], 2, report=report())]
    seating, _ = seating_of(members, jobs)
    assert seating.fill(options_of(seating, 2, 2)) == []
    assert sorted(seating.packing.seats) == [((0,), 2), ((1,), 2)]
    assert seating.packing.moved().sum() == 1


def test_a_larger_job_goes_where_no_smaller_one_has_to_give_way():
    jobs = [job(1, report=report()), running(2, ["n000"], 1, report=report())]
    seating, _ = seating_of(nodes(2), jobs)
    assert seating.repack(options_of(seating, 4, 1)) == []
    assert seating.packing.seats == [((1,), 4), ((0,), 1)]


def test_no_second_job_spans_the_nodes_of_a_pinned_one():
    """Six GPUs for the second job would take both nodes of the pinned one."""
    jobs = [running(1, ["n000", "n001"], 1, report=report(), pinned=True), job(2, report=report())]
    seating, _ = seating_of(nodes(2), jobs, partial_nodes=True)
    three, six = (seating.move[int(options_of(seating, 2, gpus)[1])] for gpus in (3, 6))
    assert three < six
    fixed = seating.utility(0)
    assert assignment.limit(seating) - fixed == pytest.approx(three, rel=1e-3)


def test_the_bound_at_low_powers_knows_what_a_move_costs():
    """Moves took half of the job's age: a larger placement is worth half."""
    jobs = [running(1, ["n000"], 1, report=report(), age=100.0, lost_seconds=50.0, move_cost=0.0)]
    seating, domain = seating_of(nodes(1), jobs, power=-np.inf)
    table = seating.table
    assert 0.4 < table.factor[~table.kept].min() <= 0.5
    found = choice.choose(table, domain, seating.packing, -np.inf)
    best = max(table.rating * np.where(table.kept, 1.0, table.factor))
    assert found.plain_bound == pytest.approx(best + objective.FLOOR, rel=1e-6)


def test_a_running_job_is_parked_only_for_a_gain():
    jobs = [running(1, ["n000"], 1, report=report()), job(2, report=report())]
    seating, _ = seating_of(nodes(1, gpus=1), jobs, waiting_power=0.0)
    nothing = [seating.stay[int(o)] for o in options_of(seating, 0, 0)]
    assert nothing[0] < nothing[1]
    assert nothing[0] == pytest.approx(nothing[1], rel=1e-6, abs=1e-6)


def test_a_program_of_exactly_the_most_variables_is_solved_where_jobs_span_nodes(monkeypatch):
    """The job has two options: nothing, and two nodes with a part on each."""
    jobs = [job(1, JobSpec(min_gpus=8, max_gpus=8), report=report())]
    seating, _ = seating_of(nodes(2), jobs)
    bounds = []
    for most in (3, 4):
        limit_assignment(monkeypatch, most)
        bounds.append(assignment.limit(seating))
    assert np.isinf(bounds[0])
    assert np.isfinite(bounds[1])
