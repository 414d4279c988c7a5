"""The task prolog, run by its environment as by Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

HOOKS = Path(__file__).resolve().parents[3] / "slurm_hooks"
POLLUX = {
    "POLLUX_GATEWAY": "https://head.example.org:9851",
    "POLLUX_SUBMITTED": "1795338957",
    "SLURM_JOB_NUM_NODES": "1",
    "SLURM_CPUS_ON_NODE": "8",
    "SLURM_NTASKS": "2",
}


def sizes(environment: dict[str, str]) -> dict[str, str | None]:
    """Return the task prolog's changes of the environment.

    A value is None where the task prolog unsets the variable.
    """
    done = subprocess.run(
        [HOOKS / "task_prolog"],
        env=environment | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    changes: dict[str, str | None] = {}
    for line in done.stdout.splitlines():
        verb, _, rest = line.partition(" ")
        name, _, value = rest.partition("=")
        changes[name] = value if verb == "export" else None
    return changes


@pytest.mark.parametrize("step", [{}, {"SLURM_STEP_ID": "-5"}])  # -5 from Slurm 26.05 on
def test_the_sizes_of_a_batch_step_are_those_of_now(step: dict[str, str]) -> None:
    assert sizes(POLLUX | step) == {
        "SLURM_NTASKS": "1",
        "SLURM_NPROCS": "1",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_CPUS_PER_TASK": "8",
        "SRUN_CPUS_PER_TASK": "8",
        "SLURM_GPUS": None,
        "SLURM_GPUS_PER_NODE": None,
        "SLURM_GPUS_PER_TASK": None,
        "SLURM_CPUS_PER_GPU": None,
        "SLURM_MEM_PER_NODE": None,
        "SLURM_DISTRIBUTION": None,
    }


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_ID": "0"},
        {"POLLUX_GATEWAY": ""},  # submitted from within a Pollux job
        {"POLLUX_SUBMITTED": ""},  # the site's variable for `polluxctl`
    ],
)
def test_other_steps_and_jobs_are_left_alone(other: dict[str, str]) -> None:
    assert sizes(POLLUX | other) == {}
    assert sizes({"SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "4"}) == {}
