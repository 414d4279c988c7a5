"""`polluxctl usage` adds up what a real slurmdbd recorded."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.model import JobState
from polluxd.slurm.configuration import Slurm
from polluxd.slurm.shares import read_shares
from tests.integration.slurm_jobs import SlurmJobs

pytestmark = pytest.mark.slurm

POLLUXCTL = Path(sys.executable).with_name("polluxctl")


@pytest.fixture(scope="module")
def accounted(scratch: Path) -> Iterator[DevCluster]:
    with DevCluster(
        scratch / "usage", nodes=3, gpus_per_node=2, lease_s=60, postgres=False, accounting=True
    ) as cluster:
        yield cluster


def usage(cluster: DevCluster, job_id: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLLUXCTL, "usage", str(job_id), "--json"],
        env=cluster.client_environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_moved_job_with_a_companion_is_added_up(accounted: DevCluster, tmp_path: Path) -> None:
    jobs = SlurmJobs(accounted, tmp_path)
    used: dict[int, float] = {}

    def submit(directive: str, *options: str) -> int:
        return jobs.submit(f"#!/bin/sh\n#POLLUX {directive}\nsleep 600\n", *options)

    # Each is timed from before its start to after its end: no record of Slurm's is longer.
    before = time.time()
    job_id = submit("max-gpus=8", "--gres=gpu:1")
    begun = time.monotonic()
    jobs.start(job_id, ("n1",), 1)
    time.sleep(3)
    jobs.requeue(job_id)
    used[1] = time.monotonic() - begun
    begun = time.monotonic()
    jobs.start(job_id, ("n1", "n2"), 2)
    claim = f"companion-of={job_id} attempt=1 move=5 nonce={'0' * 32}"
    companion = submit(claim, "--gres=gpu:2", "--no-requeue")
    submit(f"companion-of={job_id + 1000} attempt=1 move=5 nonce={'0' * 32}", "--gres=gpu:1")
    joined = time.monotonic()
    jobs.start(companion, ("n3",), 2)
    time.sleep(3)
    accounted.command("scancel", str(companion))
    jobs.wait(companion, JobState.CANCELLED)
    used[2] = time.monotonic() - joined
    jobs.end()
    used[4] = time.monotonic() - begun
    told: dict[str, Any] = {}

    def recorded() -> bool:
        nonlocal told
        done = usage(accounted, job_id)
        assert done.returncode == 0, done.stderr
        (told,) = json.loads(done.stdout)
        return told["state"] == "CANCELLED" and told["companions"] == 1

    wait_until(recorded, 60, "slurmdbd's record")
    most = sum(gpus * (seconds + 1) for gpus, seconds in used.items())
    assert sum(gpus * 2 for gpus in used) <= told["gpu_s"] <= most
    assert 2 * 2 <= told["companion_gpu_s"] <= 2 * (used[2] + 1)
    assert told["restarts"] == 1
    assert 4 <= told["wall_s"] <= used[1] + used[4] + 2
    assert abs(told["submitted_at"] - before) < 30
    assert told["waited_s"] + told["wall_s"] <= told["ended_at"] - told["submitted_at"] + 1
    assert told["energy_j"] is None, "the private cluster measures none"
    # The documented lines, added up by hand.
    day = time.strftime("%Y-%m-%d", time.localtime(before))
    own = f"sacct --duplicates --noconvert -nPX -j {job_id} -o JobID,State,Start,ElapsedRaw,AllocTRES"
    lent = f"sacct --duplicates --noconvert -nPX --uid 0 -S {day} "
    lent += f"-o JobID,State,Start,ElapsedRaw,AllocTRES,AdminComment | grep companion-of={job_id}"
    lines = [line for words in (own, lent) for line in accounted.command("sh", "-c", words).splitlines()]
    by_hand = [int(line.split("|")[3]) * int(re.findall(r"gres/gpu=(\d+)", line)[0]) for line in lines]
    assert (len(by_hand), sum(by_hand)) == (3, told["gpu_s"])


def test_an_unknown_job_and_a_cluster_without_slurmdbd_are_told(
    accounted: DevCluster, dev_cluster: DevCluster
) -> None:
    unknown = usage(accounted, 999999)
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "no job 999999" in unknown.stderr
    without = usage(dev_cluster, 1)
    assert (without.returncode, without.stdout) == (1, "")
    assert "slurmdbd" in without.stderr


def test_shares_are_read_from_slurmdbd(accounted: DevCluster) -> None:
    for words in ("vision fairshare=2", "nlp fairshare=1"):
        accounted.command(
            "sacctmgr", "-i", "add", "account", *words.split(), f"cluster={accounted.cluster_name}"
        )
    for account in ("vision", "nlp"):
        accounted.command("sacctmgr", "-i", "add", "user", "daemon", f"account={account}", "fairshare=1")
    found = read_shares(Slurm(accounted.slurm_conf, timeout=60.0).ask, accounted.cluster_name)
    assert found.accounts["vision"] / found.accounts["nlp"] == pytest.approx(2.0, rel=0.01)
    assert found.users["daemon"] == 1.0
