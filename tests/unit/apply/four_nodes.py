"""Jobs of a partition of four nodes, and plain jobs beside them."""

from __future__ import annotations

from polluxd.model import NO_PLACEMENT, JobState, Node, Placement
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition, Rules
from tests.build import slurm_job

NOW = 1_800_000_000.0
HOUR = 3600.0
NODES = tuple(Node(f"n{i}", 4, partitions=frozenset({"main"})) for i in (1, 2, 3, 4))
ALL = frozenset(node.name for node in NODES)
MAIN = {"main": Partition("main", "UP", ALL)}


def job(
    job_id: int = 1, state: JobState = JobState.RUNNING, limit: float | None = 2 * HOUR, **other: object
) -> SlurmJob:
    running = state is JobState.RUNNING
    known = {
        **dict(user="alice", account="vision", submit_time=NOW - HOUR, time_limit_s=limit),
        "start_time": NOW - 60 if running else None,
    }
    return slurm_job(job_id, state, Placement(("n1",), 4) if running else NO_PLACEMENT, **{**known, **other})


RULES = Rules({"main": Partition("main", "UP", ALL), "high": Partition("high", "UP", ALL, tier=10)})


def plain(job_id: int = 9, **other: object) -> SlurmJob:
    words = {
        "priority": 100,
        "reason": "Resources",
        "requested_gpus_per_node": 4,
        "tres": {"gres/gpu": 8, "node": 2},
    }
    return job(job_id, JobState.PENDING, spec=None, **(words | other))


def ours(**other: object) -> SlurmJob:
    return job(1, JobState.PENDING, **({"priority": 50} | other))
