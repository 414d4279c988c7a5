"""GPUs that polluxd leaves to plain jobs."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from polluxd.apply.plain_jobs import IdleFor, at_risk, left_to_plain_jobs
from polluxd.model import JobSpec, JobState, Placement, SnapshotJob
from polluxd.slurm.demands import of_plain_job
from polluxd.slurm.limits import GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import ClusterState, SlurmJob
from tests.build import job as build_job
from tests.unit.apply.four_nodes import NODES, NOW, RULES, job, ours, plain


def left(
    *jobs: SlurmJob, placements: tuple[Placement, ...] = (), idle_for: IdleFor | None = None, **placed: object
) -> dict[str, int]:
    """GPUs left to plain jobs while jobs of at least 4 GPUs hold `placements`."""
    idle_for = idle_for or IdleFor(inf)
    words = {"spec": JobSpec(min_gpus=4)} | placed
    ours = [placed_job(number, placement, **words) for number, placement in enumerate(placements, 1)]
    state = ClusterState(max((job.submit_time for job in jobs), default=NOW), NODES, jobs, rules=RULES)
    return dict(left_to_plain_jobs(state, ours, {}, idle_for=idle_for))


def placed_job(job_id: int, placement: Placement, spec: JobSpec, **other: object) -> SnapshotJob:
    return build_job(job_id, spec, **{"user": "alice", "placement": placement, "age": 0.0, **other})


def test_free_gpus_are_left_to_a_plain_job_of_higher_priority() -> None:
    held = (Placement(("n1", "n2"), 4), Placement(("n3",), 1))
    assert left(plain(), ours(), placements=held) == {"n3": 3, "n4": 4}
    assert left(plain(planned_nodes=("n3",)), ours(), placements=held) == {"n3": 3}, "Slurm names the nodes"
    assert left(plain(tres={}, requested_gpus_per_node=2), ours(), placements=held) == {"n4": 2}


def test_two_plain_jobs_do_not_count_the_same_gpus() -> None:
    assert left(plain(8), plain(9)) == dict.fromkeys(("n1", "n2", "n3", "n4"), 4)


def test_a_plain_job_that_asks_for_a_type_blocks_no_gpus_of_others() -> None:
    kinds = {"n1": "a100", "n2": "t4", "n3": "a100+t4"}
    nodes = tuple(replace(node, gpu_type=kinds.get(node.name, "")) for node in NODES)
    asks = plain(requested_gpus_per_node=1, tres={"gres/gpu": 1}, demands=of_plain_job("gres:gpu:a100:1"))
    held = [placed_job(1, Placement(("n1", "n3"), 4), JobSpec(min_gpus=4))]
    state = ClusterState(NOW, nodes, (asks, ours()), rules=RULES)
    assert left_to_plain_jobs(state, held, {}) == {}, "n2 and n4 have none of that type"
    assert left_to_plain_jobs(state, [], {}).keys() <= {"n1", "n3"}


@pytest.mark.parametrize(
    "other",
    [
        {"reason": "AssocGrpGRES"},
        {"reason": "BeginTime"},
        {"dependent": True},
        {"held_by_user": True},
        {"priority": 50},
        {"requested_gpus_per_node": 0, "tres": {"cpu": 4}},
    ],
)
def test_other_plain_jobs_block_nothing(other: dict[str, object]) -> None:
    assert left(plain(**other), ours()) == {}


def test_a_higher_tier_comes_before_any_priority() -> None:
    assert left(plain(), ours(partition="high", priority=1)) == {}
    assert left(plain(partition="high", priority=1), ours()) == {"n1": 4, "n2": 4}
    running = job(1, partition="high")
    assert left(plain(), running) == {}, "it may grow first"
    assert left(plain(), job(1)) != {}, "a running job of the same tier waits for it"
    assert left(plain(), job(1, JobState.CANCELLED, partition="high")) != {}, "Slurm still lists an ended job"
    held_back = job(1, JobState.PENDING, partition="high", held_by_user=True)
    assert left(plain(), held_back) != {}, "its user holds it"


WHOLE = Placement(("n1", "n2", "n3", "n4"), 4)
PLANNED = plain(planned_nodes=("n1", "n2"))


def test_growth_is_left_to_a_plain_job_that_can_start_with_it() -> None:
    assert left(PLANNED, ours(), placements=(WHOLE,)) == {"n1": 4, "n2": 4}
    assert left(plain(), ours(), placements=(WHOLE,)) == {}, "Slurm has not said where it can start"
    assert left(PLANNED, ours(priority=200), placements=(WHOLE,)) == {}, "the Pollux job comes first"
    part = (Placement(("n2", "n3"), 4),)
    assert left(PLANNED, ours(), placements=part) == {"n1": 4, "n2": 4}, "beside what is free"
    one = plain(planned_nodes=("n1",), requested_gpus_per_node=3, tres={"gres/gpu": 3, "node": 1})
    assert left(one, ours(), placements=(Placement(("n1",), 4),), spec=JobSpec()) == {"n1": 3}


@pytest.mark.parametrize(
    "placed",
    [
        {"spec": JobSpec(min_gpus=12)},
        {"spec": JobSpec(min_gpus=4, gpu_counts="powers-of-two")},
        {"pinned": True},
    ],
)
def test_what_a_job_needs_is_not_left_to_plain_jobs(placed: dict[str, object]) -> None:
    assert left(PLANNED, ours(), placements=(WHOLE,), **placed) == {}


def test_plain_jobs_that_cannot_start_keep_nothing_idle_for_long() -> None:
    """What they lack, another job of their user may hold on purpose; each may be a new one."""
    held = (Placement(("n1", "n2", "n3"), 4), Placement(("n4",), 1))
    idle_for = IdleFor(30.0)
    # 250 s of a loop of jobs of 25 s each; and once more, ten minutes later.
    for after, gpus in ((0, 3), (25, 3), (50, 0), (250, 0), (860, 3), (895, 0)):
        new = plain(10 + after, submit_time=NOW + after, uid=5)
        assert left(new, ours(), placements=held, idle_for=idle_for) == ({"n4": gpus} if gpus else {})
    assert left(plain(uid=6), ours(), placements=held, idle_for=idle_for) == {"n4": 3}, "another user's"
    free = (Placement(("n1", "n2"), 4),)
    assert left(new, ours(), placements=free, idle_for=idle_for) == {"n3": 4, "n4": 4}, "it can start"


def test_growth_is_given_once() -> None:
    """The second plain job would leave the Pollux job less than it needs."""
    second = plain(8, priority=90, planned_nodes=("n3", "n4"))
    assert left(PLANNED, second, ours(), placements=(WHOLE,)) == {"n1": 4, "n2": 4}
    two = (Placement(("n1", "n2"), 4), Placement(("n3", "n4"), 4))
    assert left(PLANNED, second, ours(), placements=two) == {}, "each keeps its least size"


def test_a_plain_job_that_cannot_start_takes_no_node_from_growth() -> None:
    held = (Placement(("n1", "n2", "n3"), 4), Placement(("n4",), 4))
    hopeless = plain(8, planned_nodes=("n1", "n4"))
    assert left(hopeless, ours(), placements=held) == {}
    second = plain(9, priority=90, planned_nodes=("n1", "n2"))
    assert left(hopeless, second, ours(), placements=held) == {"n1": 4, "n2": 4}


@pytest.mark.parametrize(
    ("other", "takes"),
    [
        ({"tres": {"gres/gpu": 4}}, True),
        (
            {"tres": {"gres/gpu": 5}, "requested_gpus_per_node": 5},
            False,
        ),  # no restart of this job makes room for it
        ({"tres": {"cpu": 8}, "requested_gpus_per_node": 0}, True),  # Slurm alone knows what else it needs
        ({"tres": {"cpu": 9}, "requested_gpus_per_node": 0}, False),
        ({"tres": {"cpu": 9}, "requested_gpus_per_node": 0, "priority": 101}, True),  # none starts behind it
        (
            {"tres": {"gres/gpu": 4, "node": 2}, "requested_gpus_per_node": 2},
            False,
        ),  # one node has two of them
        ({"tres": {"gres/gpu": 4}, "reason": "Dependency", "dependent": True}, False),
        ({"tres": {"gres/gpu": 4}, "held_by_user": True}, False),
        ({"reason": "QOSMaxJobsPerUserLimit", "qos": "normal"}, True),
        ({"reason": "QOSMaxJobsPerUserLimit", "qos": "other"}, False),
        ({"reason": "BeginTime"}, False),
    ],
)
def test_a_requeue_makes_room_for_a_plain_job_that_waits(other: dict[str, object], *, takes: bool) -> None:
    mine = job(1, qos="normal", priority=100, gpus_per_node_held={"n1": 2}, cpus_per_node_held={"n1": 6})
    full = {"foreign_gpus": 4, "foreign_cpus": 8}
    foreign = tuple(replace(node, cpus=8, **({} if node.name == "n1" else full)) for node in NODES)
    limits = Limits(qos={"normal": Qos("normal", GroupLimits(jobs=9), JobLimits())})
    state = ClusterState(NOW, foreign, (mine, plain(**other)), rules=RULES, limits=limits)
    assert set(at_risk(state)) == ({1} if takes else set())
    kept_back = replace(state, jobs=(mine, replace(plain(**other), spec=JobSpec())))
    assert not at_risk(kept_back), "polluxd starts it"
    assert set(at_risk(kept_back, contending={9})) == ({1} if takes else set())
