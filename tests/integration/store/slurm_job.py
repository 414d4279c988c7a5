"""A Slurm job, in as much as the store reads of one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from polluxd.model import JobSpec, JobState


@dataclass(frozen=True)
class Seen:
    """It runs on four GPUs unless said otherwise."""

    job_id: int
    name: str = "train"
    user: str = "alice"
    uid: int = 1000
    account: str = "physics"
    partition: str = "gpu"
    state: JobState = JobState.RUNNING
    raw_state: str = "RUNNING"
    reason: str = "None"
    restart_count: int = 0
    submit_time: float = field(default_factory=lambda: time.time() - 100)
    start_time: float | None = field(default_factory=lambda: time.time() - 90)
    end_time: float | None = None
    gpus_per_node_held: Mapping[str, int] = field(default_factory=lambda: {"n1": 4})
    spec: JobSpec | None = field(default_factory=JobSpec)
