"""Rings of moves that wait for each other."""

from __future__ import annotations

from collections import Counter

from polluxd.apply.capacity import Capacity
from polluxd.model import NO_PLACEMENT, Placement, Step
from tests.build import move as build_move


def move(number, source, target, step=Step.PLANNED):
    path = "requeue" if source else "start"
    return build_move(path, source, target, step, id=number, job_id=number)


def test_two_jobs_that_swap_nodes_are_a_knot():
    small = move(1, Placement(("n4",), 1), Placement(("n3",), 2))
    large = move(2, Placement(("n3",), 2), Placement(("n4",), 4))
    room = Capacity(free=Counter({"n3": 0, "n4": 3}))
    assert not room.fits_soon(small.target, small.source, small.job_id)
    assert not room.fits_soon(large.target, large.source, large.job_id)
    assert room.ring([small, large]) == [small, large]


def test_a_ring_of_three_on_full_nodes():
    nodes = ("n1", "n2", "n3")
    ring = [
        move(i, Placement((a,), 4), Placement((b,), 4))
        for i, (a, b) in enumerate(zip(nodes, nodes[1:] + nodes[:1], strict=True), 1)
    ]
    assert Capacity().ring(ring) == ring


SWAP = [
    move(1, Placement(("n1",), 4), Placement(("n2",), 4)),
    move(2, Placement(("n2",), 4), Placement(("n1",), 4)),
]


def test_a_move_that_nothing_makes_room_for_is_left_out():
    hopeless = move(3, Placement(("n3",), 4), Placement(("n3", "n4"), 4))
    assert Capacity(free=Counter({"n4": 3})).ring([*SWAP, hopeless]) == SWAP
    assert Capacity(free=Counter({"n4": 3})).ring([hopeless]) == []


def test_jobs_that_hold_nothing_and_moves_under_way_tie_no_knot():
    start = move(1, NO_PLACEMENT, Placement(("n1",), 4))
    draining = move(2, Placement(("n1",), 4), Placement(("n2",), 4), Step.DRAINING)
    assert Capacity().ring([start, draining]) == []
    assert Capacity(free=Counter({"n1": 4, "n2": 4})).ring([start, draining]) == []


def test_of_moves_that_compete_the_one_that_takes_most_is_left_out() -> None:
    greedy = move(3, Placement(("n3",), 1), Placement(("n1",), 4))
    assert Capacity().ring([*SWAP, greedy]) == SWAP
