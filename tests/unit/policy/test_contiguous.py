"""Jobs with --contiguous get nodes that are neighbours to Slurm."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from polluxd.model import JobSpec, Node, Placement, Snapshot, SnapshotJob
from polluxd.policy import decide
from tests.build import job, node, report, running, snapshot
from tests.unit.policy.scenarios import applied

EIGHT = JobSpec(min_gpus=8, max_gpus=8)
STAYS = JobSpec(min_gpus=4, max_gpus=4, preemptible=False)


def row(*names: str) -> list[Node]:
    """Nodes of four GPUs in Slurm's order, which is not that of their names."""
    return [replace(node(name, 4), position=place) for place, name in enumerate(names)]


def consecutive(found: Snapshot, placement: Placement) -> bool:
    position = {n.name: n.position for n in found.nodes}
    places = sorted(position[name] for name in placement.nodes)
    return places == list(range(places[0], places[0] + len(places))) if places else True


def contiguous(number: int, spec: JobSpec = EIGHT) -> SnapshotJob:
    return replace(job(number, spec, report=report()), contiguous=True)


def test_neighbours_are_taken_where_other_nodes_would_fit_as_well():
    nodes = row("d", "a", "c", "b")
    busy = running(1, ["a"], 4, STAYS, report=report())
    assert decide(snapshot(nodes, [busy, contiguous(2)])).of(2).placement == Placement(("b", "c"), 4)


def test_without_neighbours_the_job_waits_or_takes_one_node():
    nodes = row("a", "b", "c")
    busy = running(1, ["b"], 4, STAYS, report=report())
    assert not decide(snapshot(nodes, [busy, contiguous(2)])).of(2).placement
    small = contiguous(2, JobSpec(min_gpus=2, max_gpus=8))
    assert len(decide(snapshot(nodes, [busy, small])).of(2).placement.nodes) == 1
    assert decide(snapshot(nodes, [busy, replace(contiguous(2), contiguous=False)])).of(2).placement.gpus == 8


def test_a_closed_node_separates_its_neighbours():
    nodes = [replace(n, schedulable=n.name != "b") for n in row("a", "b", "c", "d")]
    assert decide(snapshot(nodes, [contiguous(2)])).of(2).placement == Placement(("c", "d"), 4)


def test_another_order_of_nodes_moves_no_job():
    nodes = row("a", "c", "b")
    here = replace(running(2, ["a", "b"], 4, EIGHT, report=report()), contiguous=True)
    assert decide(snapshot(nodes, [here])).of(2).placement == Placement(("a", "b"), 4)


def busy_cluster(seed: int) -> Snapshot:
    """Jobs of one to four nodes of two GPUs; half of them want neighbours."""
    rng = random.Random(seed)
    names = rng.sample([f"n{number}" for number in range(8)], 8)
    nodes = [replace(n, gpus=2, foreign_gpus=rng.choice([0, 0, 0, 0, 2])) for n in row(*names)]
    jobs = [
        replace(contiguous(number, JobSpec(rng.choice([1, 3, 4]), 8)), contiguous=number % 2 == 1)
        for number in range(6)
    ]
    return snapshot(nodes, jobs, partial_nodes=rng.random() < 0.3)


@pytest.mark.parametrize("seed", range(8))
def test_it_holds_over_moves_on_a_busy_cluster(seed):
    now = busy_cluster(seed)
    for leaves in range(4):
        plan, before = decide(now), {j.job_id: j.placement for j in now.jobs}
        for j in now.jobs:
            given = plan.of(j.job_id).placement
            assert not j.contiguous or given == before[j.job_id] or consecutive(now, given)
        left = applied(now, plan)
        come = replace(contiguous(10 + leaves, JobSpec(3, 4)), contiguous=leaves % 2 == 0)
        now = replace(left, jobs=(*(j for j in left.jobs if j.job_id != leaves), come))
