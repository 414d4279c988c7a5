"""`polluxctl explain` of jobs without a `#POLLUX` line, by what a real Slurm shows of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.model import JobState
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

POLLUXCTL = Path(sys.executable).with_name("polluxctl")


def explained(cluster: DevCluster, job: int) -> str:
    done = subprocess.run(
        [POLLUXCTL, "explain", str(job)],
        env=cluster.client_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plain_job_is_explained_by_what_slurm_shows(dev_cluster: DevCluster, tmp_path: Path) -> None:
    jobs = SlurmJobs(dev_cluster, tmp_path)
    sleep = "#!/bin/sh\nsleep 600\n"

    def waiting(*options: str, reason: str) -> str:
        job = jobs.submit(sleep, *options)
        wait_until(
            lambda: dev_cluster.command("squeue", "-h", "-j", str(job), "-o", "%r").strip() == reason,
            100,
            reason,
        )
        return explained(dev_cluster, job)

    try:
        nodes = dev_cluster.command("sinfo", "-h", "-o", "%D").strip()
        running = jobs.submit(sleep, f"--nodes={nodes}", "--gres=gpu:2", "--exclusive")
        jobs.wait(running, JobState.RUNNING)
        assert f"is running with {2 * int(nodes)} GPUs on " in explained(dev_cluster, running)
        held = waiting("--hold", reason="JobHeldUser")
        assert "is pending: it waits by its own options (JobHeldUser). `scontrol release " in held
        assert "own options (Dependency)" in waiting(f"--dependency=afterok:{running}", reason="Dependency")
        assert "waits for GPUs, cores or memory to become free (Resources)." in waiting(
            "--gres=gpu:1", "--nice=10", reason="Resources"
        )
        behind = waiting("--gres=gpu:1", "--nice=100", reason="Priority")
        assert "jobs of higher priority come before it (Priority). 1 waiting job of partition" in behind
        dev_cluster.command("scontrol", "update", "nodename=n1", "state=drain", "reason=fan")
        out = waiting("--nodelist=n1", "--nice=1", reason="ReqNodeNotAvail, UnavailableNodes:n1")
        assert "nodes that it asks for are down, drained, reserved, or do not exist" in out
        dev_cluster.command("scontrol", "update", "nodename=n1", "state=resume")
    finally:
        for job in jobs.ids:
            dev_cluster.command("scancel", str(job))
