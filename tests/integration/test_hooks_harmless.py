"""Missing and broken hooks on a real Slurm stop nobody.

No job is refused, slurmctld starts, and no node is drained.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.model import JobState
from polluxd.slurm.protocol import SlurmJob
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[DevCluster]:
    with DevCluster(scratch / "harmless", nodes=1, postgres=False) as made:
        yield made


@pytest.fixture
def hooks(cluster: DevCluster) -> Iterator[Path]:
    """The folder of the installed hooks; it is whole again after the test."""
    folder = cluster.slurm_conf.with_name("hooks")
    copy = folder.with_name("whole")
    shutil.copytree(folder, copy)
    yield folder
    shutil.rmtree(folder)
    copy.rename(folder)


def run_job(cluster: DevCluster, directive: str) -> SlurmJob:
    """Run a job of one GPU with a line in its script to its end."""
    jobs = SlurmJobs(cluster, cluster.directory)
    job_id = jobs.submit(f"#!/bin/sh\n#SBATCH --gres=gpu:1\n{directive}\ntrue\n")
    return jobs.wait(job_id, JobState.COMPLETED)


@pytest.mark.parametrize("fault", ["missing", "a folder", "broken", "raises"])
def test_slurmctld_starts_and_every_job_passes(cluster: DevCluster, hooks: Path, fault: str) -> None:
    script = hooks / "job_submit.lua"
    script.unlink()
    match fault:
        case "a folder":  # what root cannot read; tests/unit/site reads it as another user
            script.mkdir()
        case "broken":
            script.write_text("function pollux_submit(")
        case "raises":
            script.write_text("function pollux_submit() return nil + 1 end pollux_modify = pollux_submit")
    log = cluster.logs / "slurmctld.log"
    before = len(log.read_text())
    cluster.restart_slurmctld()
    assert "pollux" not in run_job(cluster, "#POLLUX min-gpus=1").admin_comment
    said = [line for line in log.read_text()[before:].splitlines() if "pollux: " in line]
    assert len(said) == 1, said
    assert ("passes unchecked" if fault == "raises" else "every job passes as a plain Slurm job") in said[0]


def test_the_folder_of_the_hooks_may_go_while_jobs_run(cluster: DevCluster, hooks: Path) -> None:
    for script in hooks.iterdir():
        script.unlink()
    run_job(cluster, "")
    assert "drain" not in cluster.command("sinfo", "-h", "-N", "-o", "%T %E")
