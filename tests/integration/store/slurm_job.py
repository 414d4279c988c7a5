"""A Slurm job, as the store's tests show one to it."""

from __future__ import annotations

import time
from typing import Any

from polluxd.model import JobState
from polluxd.slurm.protocol import SlurmJob
from tests.build import slurm_job


def seen(job_id: int, state: JobState = JobState.RUNNING, **more: Any) -> SlurmJob:
    """It runs on four GPUs unless said otherwise."""
    times = {"submit_time": time.time() - 100, "start_time": time.time() - 90}
    names = {
        "name": "train",
        "user": "alice",
        "account": "physics",
        "partition": "gpu",
        "raw_state": "RUNNING",
    }
    return slurm_job(job_id, state, **{"gpus_per_node_held": {"n1": 4}, **times, **names, **more})
