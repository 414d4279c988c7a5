"""Run Slurm's commands, whatever the user's environment says to them.

srun, sbatch, scontrol, squeue and scancel take options from variables too: a user, a site's profile, Open OnDemand
(`sbatch --export=NONE`) or the shell of an interactive step sets them. The agent gives its options itself, so a command
gets none of Slurm's variables but those that are kept here.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping

_SLURMS = re.compile(
    r"(SLURM|SLURMD|SRUN|SBATCH|SALLOC|SQUEUE|SINFO|SCONTROL|SCANCEL|SACCT|SACCTMGR|SBCAST|SATTACH|SPRIO|PMI|PMIX)_.*"
)
"""Variables that Slurm writes or reads."""
_CONTACT = r"SLURM_(CONF|CONF_SERVER|JWT|SACK_\w+)"
"""How to reach Slurm."""
_OF_JOB = (
    r"SLURM_(JOBID|JOB_.*|ARRAY_.*|HET_.*|RESTART_COUNT|SUBMIT_.*|CLUSTER_NAME|WORKING_CLUSTER|NODELIST|NODE_ALIASES"
    r"|TOPOLOGY_.*|\w+_ON_NODE|PRIO_PROCESS|RLIMIT_.*|UMASK|SCRIPT_CONTEXT)|SLURMD_NODENAME"
)
"""What Slurm writes at each start of a batch script about its job, its node, and limits that srun hands on."""


def for_commands(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a command other than srun."""
    return _without(environ, _CONTACT)


def for_srun(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of an srun in the job's batch script, and of its tasks.

    Dropped, beside options: sizes of the submission (a job that polluxd has resized keeps them), and the variables of
    a step around this process.
    """
    return _without(environ, f"{_CONTACT}|{_OF_JOB}")


def _without(environ: Mapping[str, str], kept: str) -> dict[str, str]:
    stays = re.compile(kept)
    return {
        name: value for name, value in environ.items() if not _SLURMS.fullmatch(name) or stays.fullmatch(name)
    }


def run(
    *command: str, timeout: float = 20.0, given: str = "", environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, whatever its status is. Raises OSError, SubprocessError.

    `given`: its input. `environ`: of this job; None: this process's.
    """
    return subprocess.run(
        command,
        input=given,
        env=for_commands(os.environ if environ is None else environ),
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
