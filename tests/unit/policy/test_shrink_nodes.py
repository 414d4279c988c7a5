"""A job that changes its size keeps the nodes that spare it the queue.

Other jobs take the nodes that it leaves.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.model import Node, Placement, SnapshotJob
from polluxd.policy.domains import Seat
from polluxd.policy.packing import Packing
from polluxd.policy.placement import leave_right_nodes
from tests.build import job as build_job

NODES = [Node(f"n{i}", 4, cpus=8) for i in range(4)]
KEEPS = ("n2", "n0", "n1")


def job(number: int, *names: str, keeps: tuple[str, ...] = ()) -> SnapshotJob:
    placement = Placement(names, 4) if names else Placement()
    return build_job(number, placement=placement, keeps=keeps)


def seated(jobs: list[SnapshotJob], seats: list[Seat], nodes: list[Node] = NODES) -> Packing:
    packing = Packing(nodes, jobs, partial=False)
    for j, seat in enumerate(seats):
        packing.put(j, seat)
    return packing


def test_it_is_left_with_its_first_nodes_and_the_newcomer_takes_the_others() -> None:
    packing = seated(
        [job(1, "n0", "n1", "n2", keeps=KEEPS), job(2, "n3"), job(3)], [((0, 1), 4), ((2, 3), 4), ((), 0)]
    )
    leave_right_nodes(packing)
    assert packing.seats == [((0, 2), 4), ((1, 3), 4), ((), 0)]
    assert packing.free.tolist() == [0, 0, 0, 0]
    assert [set(guests) for guests in packing.guests] == [{0}, {1}, {0}, {1}]


def test_two_who_share_the_node_take_the_other_one_together() -> None:
    packing = seated(
        [job(1, "n0", "n1", "n2", keeps=KEEPS), job(2), job(3)], [((1,), 4), ((2,), 1), ((2,), 3)]
    )
    leave_right_nodes(packing)
    assert packing.seats == [((2,), 4), ((1,), 1), ((1,), 3)]


def test_it_is_left_with_its_first_nodes_where_the_newcomer_has_taken_them_all() -> None:
    packing = seated([job(1, "n0", "n1", keeps=("n1", "n0")), job(2, "n2")], [((3,), 4), ((0, 1, 2), 4)])
    leave_right_nodes(packing)
    assert packing.seats == [((1,), 4), ((0, 2, 3), 4)]


def test_who_grows_keeps_its_nodes() -> None:
    packing = seated([job(1, "n1"), job(2, "n3")], [((0, 1), 4), ((2, 3), 4)])
    leave_right_nodes(packing)
    assert packing.seats == [((0, 1), 4), ((2, 3), 4)]
    packing = seated([job(1, "n2"), job(2)], [((0, 1), 4), ((2, 3), 4)])
    leave_right_nodes(packing)
    assert packing.seats == [((1, 2), 4), ((0, 3), 4)]


@pytest.mark.parametrize(
    ("first", "seats"),
    [
        (job(1, "n0", "n1", "n2"), [((0, 1), 4), ((2, 3), 4)]),  # it cannot shrink but through the queue
        (job(1, "n0", "n1", "n2", keeps=KEEPS), [((0, 2), 4), ((1, 3), 4)]),  # it is right already
        (job(1, "n0", "n1", keeps=KEEPS[1:]), [((0, 2), 4), ((1, 3), 4)]),  # it moves
        (job(1, "n0", "n1", "n2", keeps=KEEPS), [((0, 1, 2), 4), ((3,), 4)]),
        (job(1, "n0", "n1", "n2", keeps=KEEPS), [((0, 1), 2), ((2, 3), 4)]),  # fewer GPUs on each node
        (replace(job(1, "n0", "n1", "n2", keeps=KEEPS), pinned=True), [((0, 1), 4), ((2, 3), 4)]),
    ],
)
def test_nothing_else_is_touched(first: SnapshotJob, seats: list[Seat]) -> None:
    packing = seated([first, job(2, "n3")], seats)
    leave_right_nodes(packing)
    assert packing.seats == seats


@pytest.mark.parametrize("change", [{"cpus": 16}, {"gpu_type": "b"}, {"rack": "r"}, {"foreign_cpus": 2}])
def test_nodes_that_differ_are_not_exchanged(change: dict[str, object]) -> None:
    nodes = [replace(NODES[0]), replace(NODES[1]), replace(NODES[2], **change), NODES[3]]  # type: ignore[arg-type]
    seats: list[Seat] = [((0, 1), 4), ((2,), 4)]
    packing = seated([job(1, "n0", "n1", "n2", keeps=KEEPS), job(2)], seats, nodes)
    leave_right_nodes(packing)
    assert packing.seats == seats


def test_whoever_is_on_the_node_already_stays_there() -> None:
    # It holds half of a node that the first one is to leave: as only partial nodes allow.
    jobs = [replace(job(1, keeps=KEEPS), placement=Placement(("n0", "n2"), 2)), job(2)]
    jobs[1] = replace(jobs[1], placement=Placement(("n2",), 2))
    seats: list[Seat] = [((0,), 2), ((2,), 4)]
    packing = seated(jobs, seats)
    leave_right_nodes(packing)
    assert packing.seats == seats
