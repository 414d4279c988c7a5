"""Drained nodes and pinned jobs, with the real policy.

Jobs leave a drained node through a checkpoint if there is room elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from polluxd.apply.placed import held
from polluxd.model import NO_PLACEMENT, JobSpec, Placement, Plan, Snapshot, Step
from polluxd.policy import decide
from tests import build

from .world import Process, World

N1, N2 = Placement(("n1",), 1), Placement(("n2",), 1)


@pytest.fixture
def world() -> Iterator[World]:
    made = World(nodes=2, policy=decide)
    yield made
    made.close()


def run(world: World, process: Process, seconds: float = 40.0) -> None:
    until = world.slurm.clock() + seconds
    while world.slurm.clock() < until:
        process.turn()
        world.pass_time(0.5)
        world.assert_sound()


def test_jobs_leave_a_drained_node_through_a_checkpoint(world: World) -> None:
    job_id = world.submit(at=N1, spec=JobSpec(max_gpus=1))
    process = Process(world)
    run(world, process)
    assert held(world.truth(job_id)) == N1
    world.slurm.set_schedulable("n1", False)
    run(world, process)
    assert held(world.truth(job_id)) == N2
    (move,) = [m for m in world.rows.moves if m.path == "requeue"]
    assert Step.CHECKPOINTED in move.times
    assert move.step is Step.TRAINING
    assert world.truth(job_id).restart_count == 1


def test_where_there_is_no_room_they_run_on(world: World) -> None:
    job_id = world.submit(at=N1, spec=JobSpec(max_gpus=1))
    process = Process(world)
    run(world, process, 10.0)
    for name in ("n1", "n2"):
        world.slurm.set_schedulable(name, False)
    run(world, process)
    assert held(world.truth(job_id)) == N1
    assert world.truth(job_id).restart_count == 0


def test_a_pinned_job_stays_even_there_and_moves_once_unpinned(world: World) -> None:
    job_id = world.submit(at=N1, spec=JobSpec(max_gpus=1))
    process = Process(world)
    run(world, process, 10.0)
    world.rows.pins[job_id] = "ann@host"
    world.slurm.set_schedulable("n1", False)
    run(world, process)
    assert held(world.truth(job_id)) == N1
    world.rows.pins.clear()
    run(world, process)
    assert held(world.truth(job_id)) == N2


def test_a_pinned_job_that_waits_is_started(world: World) -> None:
    job_id = world.submit(spec=JobSpec(max_gpus=1))
    world.rows.pins[job_id] = "ann@host"
    run(world, Process(world), 20.0)
    placed = held(world.truth(job_id))
    assert placed.gpus == 1


def half_each(snapshot: Snapshot) -> Plan:
    """All to the only job; a node each to two."""
    nodes = [node.name for node in snapshot.nodes]
    each = len(nodes) // len(snapshot.jobs)
    places = {
        job.job_id: Placement(tuple(nodes[n * each : (n + 1) * each]), 4)
        for n, job in enumerate(snapshot.jobs)
    }
    return build.plan(snapshot.jobs, places)


@pytest.mark.parametrize("others", [1001, 1000])
def test_a_job_that_keeps_its_gpus_from_others_is_requeued(others: int) -> None:
    """It refuses each drain. Another job of its user changes nothing."""
    world = World(nodes=2, policy=half_each)
    greedy = world.submit(at=Placement(("n1", "n2"), 4), uid=1000)
    world.trainings[greedy].keeps_gpus = True
    process = Process(world)
    run(world, process, 10.0)
    waits = world.submit(uid=others)
    run(world, process, 150.0)
    world.close()
    refused = [m for m in world.rows.moves if m.job_id == greedy and m.step is Step.FAILED]
    assert "could not drain" in refused[0].detail
    assert (held(world.truth(waits)) == Placement(("n2",), 4)) == (others == 1001)
    assert (held(world.truth(greedy)) == Placement(("n1",), 4)) == (others == 1001)
    assert held(world.truth(greedy)) != NO_PLACEMENT
