"""The tasks of a search, as Slurm knows them."""

from __future__ import annotations

import os
import subprocess

NAME_VARIABLE = "POLLUX_SEARCH"
"""Name of the job's search; set by the submission hook for the directive `search`, and by `polluxctl tune`."""
TASK_VARIABLE = "POLLUX_SEARCH_TASK"
"""The task that a companion job works for, and the journal: `TASK:PATH`; set by rank 0."""
FOLDER = "pollux-searches"
"""Of the journals, beside where a job was submitted."""
TRIAL_VARIABLES = (NAME_VARIABLE, TASK_VARIABLE)


def tasks_in_queue(uid: int | None = None) -> frozenset[str] | None:
    """Return a user's (this one's) jobs that wait or run, by name; None where Slurm does not answer. squeue(1)."""
    try:
        done = subprocess.run(
            [
                "squeue",
                "--noheader",
                "--array",
                "--format=%i",
                f"--user={os.getuid() if uid is None else uid}",
            ],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return frozenset(done.stdout.split())
