"""Write a launcher's lines into the job's output."""

from __future__ import annotations

import sys

from pollux.slurm_job.allocation import node_name


def say(message: str) -> None:
    """A line in the job's output."""
    print(f"pollux run [{node_name()}]: {message}", file=sys.stderr, flush=True)
