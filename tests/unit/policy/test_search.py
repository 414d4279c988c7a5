"""The searches that improve a plan, each by itself, from a poor plan."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.model import JobSpec
from polluxd.policy import assignment, exchange, objective, search, worst_off
from polluxd.policy.layout import NOWHERE
from polluxd.policy.shapes import Shape
from tests.unit.policy.scenarios import job, node, nodes, report, running
from tests.unit.policy.test_placement import options_of, seating_of


def seat(seating, j, gpus, *numbers):
    """Seat job number `j` on these nodes, with so many GPUs in all."""
    option = next(o for o in seating.table.options(j) if seating.gpus[o] == gpus)
    seating.give(j, option, (numbers, gpus // len(numbers)))


def test_the_bound_counts_only_the_group_s_own_jobs_towards_its_ceiling():
    """Ada may hold one GPU: one of her two jobs waits, and Bob's two run."""
    spec = JobSpec(max_gpus=1)
    jobs = [job(n, spec, report=report(), user=user) for n, user in enumerate(["ada", "ada", "bob", "bob"])]
    seating, _ = seating_of(nodes(1), jobs, user_ceilings={"ada": 1}, power=1.0)
    nothing, one = (seating.move[int(options_of(seating, gpus, 1, 1, 1)[0])] for gpus in (0, 1))
    assert assignment.limit(seating) == pytest.approx(3 * one + nothing, rel=1e-4)


def test_a_division_finds_equal_parts_of_both_nodes_where_one_node_has_too_little():
    """Three GPUs are free on each of two nodes: the job could have six."""
    members = [node("n000", foreign_gpus=1), node("n001", foreign_gpus=1), node("n002")]
    jobs = [job(1, report=report()), running(2, ["n002"], 4, report=report(), pinned=True)]
    seating, _ = seating_of(members, jobs, partial_nodes=True)
    exchange.improve(seating, 0.0, 1e-9, 10)
    assert seating.packing.seats[0] == ((0, 1), 3)


def test_a_division_that_a_ceiling_forbids_leaves_every_job_where_it_is():
    jobs = [running(n, [f"n00{n}"], 2, report=report()) for n in (0, 1)]
    seating, _ = seating_of(nodes(2), jobs, user_ceilings={"ada": 4})
    for j in (0, 1):
        seat(seating, j, 2, j)
    before = seating.state()
    assert exchange.improve(seating, 0.0, 0.0, 10) > 0
    assert seating.state() == before


def test_a_job_that_must_shrink_loses_no_more_than_its_best_smaller_option():
    seating, _ = seating_of(nodes(1), [job(1, report=report())])
    assert seating.best_move(0, 3) == seating.move[int(options_of(seating, 3)[0])]


def test_room_for_three_gpus_is_made_by_the_larger_guest_or_by_both():
    """Who leaves may come back to what is left over: one GPU of five, or two."""
    jobs = [job(1, report=report()), job(2, report=report()), job(3, report=report())]
    seating, _ = seating_of(nodes(1, gpus=5), jobs)
    seat(seating, 0, 4, 0)
    seat(seating, 1, 1, 0)
    now, one, two = (seating.move[int(options_of(seating, gpus, 1, 1)[0])] for gpus in (4, 1, 2))
    found = {tuple(way.victims): way.cost for way in search.ways(seating, 2, Shape(1, 3))}
    assert found == pytest.approx({(0,): now - one, (0, 1): now - two})


def test_a_seat_that_brings_nothing_does_not_stand_in_the_way_of_the_next():
    """Another job has the seat of two GPUs that the job would like best.

    It sits elsewhere with three GPUs: four are better there, two are worse.
    """
    mover = running(1, ["n000"], 2, report=report(), age=100.0, lost_seconds=60.0, move_cost=0.0)
    jobs = [mover, job(2, JobSpec(min_gpus=4, max_gpus=4), report=report(), weight=100.0)]
    seating, _ = seating_of(nodes(2), jobs)
    seat(seating, 1, 4, 0)
    seat(seating, 0, 3, 1)
    four, two = (int(options_of(seating, gpus, 4)[0]) for gpus in (4, 2))
    assert seating.stay[two] > seating.move[four] > seating.utility(0) > seating.move[two]
    search.improve(seating, seating.move[four] + seating.utility(1), 1e-9)
    assert seating.packing.seats == [((1,), 4), ((0,), 4)]


@pytest.mark.parametrize("gpus", range(2, 10))
def test_the_worst_off_of_two_jobs_is_lifted_to_half_of_the_node(gpus):
    seating, _ = seating_of(nodes(1, gpus), [job(n, report=report()) for n in (1, 2)], power=-np.inf)
    half = (seating.table.rating[options_of(seating, gpus // 2, gpus // 2)] + objective.FLOOR).min()
    for bound in (half, 100.0):
        seating.clear()
        assert seating.packing.seats == [NOWHERE] * 2
        worst_off.lift(seating, bound)
        assert min(seating.gpus[o] for o in seating.option) == gpus // 2
