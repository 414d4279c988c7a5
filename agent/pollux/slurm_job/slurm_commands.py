"""Run Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping


def run(
    *command: str, timeout: float = 20.0, given: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its status is. Raises OSError, SubprocessError.

    `given`: its input. `environ`: of the command; None: this process's.
    """
    return subprocess.run(
        command,
        input=given,
        env=environ,
        capture_output=True,
        text=True,
        errors="surrogateescape",  # names and paths of jobs may be any bytes
        timeout=timeout,
        check=False,
    )


def answer(*command: str, timeout: float = 20.0) -> str | None:
    """Return what a command prints; None where Slurm does not answer."""
    try:
        done = run(*command, timeout=timeout)
    except (OSError, subprocess.SubprocessError):
        return None
    return None if done.returncode else done.stdout.strip()


def tasks_in_queue(uid: int | None = None) -> frozenset[str] | None:
    """Return a user's (this one's) jobs that wait or run, by name; None where Slurm does not answer. squeue(1)."""
    user = os.getuid() if uid is None else uid
    shown = answer("squeue", "--noheader", "--array", "--format=%i", f"--user={user}", timeout=60)
    return None if shown is None else frozenset(shown.split())
