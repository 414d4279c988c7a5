"""GPUs that polluxd leaves to plain jobs."""

from __future__ import annotations

import pytest

from polluxd.apply.neighbours import left_to_plain_jobs
from polluxd.model import JobState, Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Rules
from tests.unit.apply.test_startable import ALL, NODES, NOW, job

RULES = Rules({"main": Partition("main", "UP", ALL), "high": Partition("high", "UP", ALL, tier=10)})


def plain(job_id: int = 9, **other: object) -> SlurmJob:
    words = {
        "priority": 100,
        "reason": "Resources",
        "requested_gpus_per_node": 4,
        "tres": {"gres/gpu": 8, "node": 2},
    }
    return job(job_id, JobState.PENDING, spec=None, **(words | other))


def left(*jobs: SlurmJob, placements: tuple[Placement, ...] = ()) -> dict[str, int]:
    found, _ = left_to_plain_jobs(ClusterState(NOW, NODES, jobs, rules=RULES), placements, {})
    return dict(found)


def ours(**other: object) -> SlurmJob:
    return job(1, JobState.PENDING, **({"priority": 50} | other))


def test_free_gpus_are_left_to_a_plain_job_of_higher_priority() -> None:
    held = (Placement(("n1", "n2"), 4), Placement(("n3",), 1))
    assert left(plain(), ours(), placements=held) == {"n3": 3, "n4": 4}
    assert left(plain(planned_nodes=("n3",)), ours(), placements=held) == {"n3": 3}, "Slurm names the nodes"
    assert left(plain(tres={}, requested_gpus_per_node=2), ours(), placements=held) == {"n4": 2}


def test_two_plain_jobs_do_not_count_the_same_gpus() -> None:
    assert left(plain(8), plain(9)) == dict.fromkeys(("n1", "n2", "n3", "n4"), 4)


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
