"""The scontrol client while slurmctld is down, frozen or restarted."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.errors import SlurmRefused, SlurmUnavailable
from polluxd.model import JobState
from polluxd.slurm.protocol import Geometry
from polluxd.slurm.scontrol import ScontrolClient
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def cluster(scratch: Path) -> Iterator[DevCluster]:
    """One of its own: the shared one must not stumble."""
    with DevCluster(scratch / "faults", nodes=2, postgres=False, lease_s=60) as made:
        yield made


def test_down_frozen_and_back(cluster: DevCluster, tmp_path: Path) -> None:
    hasty, slurm = (ScontrolClient(conf=cluster.slurm_conf, timeout=s) for s in (2.0, 60.0))
    job_id = SlurmJobs(cluster, tmp_path).submit("#!/bin/sh\n#POLLUX\nsleep 100\n", "--gres=gpu:1")
    place = Geometry(("n2",), 3, 3)
    slurm.configure(job_id, place, start=False)

    cluster.signal_slurmctld(signal.SIGSTOP)
    for call in (hasty.observe, lambda: hasty.configure(job_id, place, start=True)):
        with pytest.raises(SlurmUnavailable):
            call()
    cluster.signal_slurmctld(signal.SIGCONT)

    # A controller that was frozen may still carry out what it had been asked: hence "read again before repeating".
    deadline = time.monotonic() + 80
    while slurm.jobs([job_id])[job_id].state is JobState.PENDING and time.monotonic() < deadline:
        with contextlib.suppress(SlurmRefused, SlurmUnavailable):  # it was carried out a moment ago
            slurm.configure(job_id, place, start=True)
        time.sleep(0.5)
    assert slurm.jobs([job_id])[job_id].gpus_per_node_held == {"n2": 3}

    cluster.stop_slurmctld()
    with pytest.raises(SlurmUnavailable):
        hasty.observe()
    with pytest.raises(SlurmUnavailable):
        hasty.requeue(job_id)
    cluster.start_slurmctld()
    job = slurm.jobs([job_id])[job_id]
    assert (job.state, job.restart_count, job.gpus_per_node_held) == (JobState.RUNNING, 0, {"n2": 3})
    assert job.spec is not None


def test_stopping_the_cluster_leaves_no_process_behind(scratch: Path, tmp_path: Path) -> None:
    mark = str(scratch / "short").encode()
    with DevCluster(scratch / "short", nodes=1, lease_s=0) as short:
        jobs = SlurmJobs(short, tmp_path)
        jobs.wait(jobs.submit("#!/bin/sh\ntrap '' TERM\nsetsid sleep 300 &\nsleep 300\n"), JobState.RUNNING)
        wait_until(lambda: len(processes(mark)) >= 5, 80, "the job's processes")
        # A second terminal, in which a user works with this cluster.
        terminal = subprocess.Popen(["sleep", "300"], env={**os.environ, **short.client_environment})
    assert terminal.poll() is None, "whoever only uses the cluster is not ended with it"
    terminal.kill()
    terminal.wait()
    assert processes(mark) == []


def processes(mark: bytes) -> list[bytes]:
    """Return the command lines of the processes that `mark` identifies.

    `mark` is in the command line, or the environment has it as SLURM_CONF.
    """
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes()
            if command and (mark in command or b"SLURM_CONF=" + mark in (folder / "environ").read_bytes()):
                found.append(command)
        except OSError:
            continue
    return found
