"""Long texts of users on a real Slurm.

The hook refuses most of them, and squeue prints little of the others.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.slurm.queue import jobs_query
from polluxd.slurm.scontrol import ScontrolClient

pytestmark = pytest.mark.slurm

MOST_OF_A_RECORD = 2000
"""Bytes; a usual record has some hundred."""


class User:
    """An ordinary user, whose jobs end with the test."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster, self.folder = cluster, folder
        self.jobs: list[str] = []

    def run(self, *argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            argv,
            env={**self.cluster.client_environment, **environment},
            user="nobody",
            group="nogroup",
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def sbatch(self, head: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = self.folder / "job.sh"
        path.write_text(f"#!/bin/sh\n{head}\nsleep 600\n")
        words = ("--parsable", "--hold", "--output=/dev/null", "--chdir=/tmp")
        done = self.run("sbatch", *words, *options, str(path), **environment)
        if done.returncode == 0:
            self.jobs.append(done.stdout.strip())
        return done

    def submit(self, head: str, *options: str) -> str:
        done = self.sbatch(head, *options)
        assert done.returncode == 0, done.stderr
        return self.jobs[-1]


@pytest.fixture
def user(dev_cluster: DevCluster, tmp_path_factory: pytest.TempPathFactory, scratch: Path) -> Iterator[User]:
    folder = scratch / tmp_path_factory.mktemp("long").name
    folder.mkdir()
    folder.chmod(0o755)
    made = User(dev_cluster, folder)
    yield made
    if made.jobs:
        dev_cluster.command("scancel", *made.jobs)


def test_a_comment_of_3_5_mb_is_refused_before_it_is_read(user: User) -> None:
    done = user.sbatch(f"#SBATCH --comment={'=' * 3_500_000}")
    assert "comment has 3500000 bytes, at most 1024 are allowed: shorten it" in done.stderr


def test_directives_of_the_environment_have_a_bound(user: User) -> None:
    done = user.sbatch("", SBATCH_POLLUX="min-gpus=1 " + "#" * 100_000)
    assert "SBATCH_POLLUX has 100011 bytes, at most 1024 are allowed: shorten it" in done.stderr


def test_an_update_makes_no_record_longer(user: User) -> None:
    # Of squeue's fields only AdminComment and Dependency may be longer than Slurm's own bound.
    job = user.submit("", "--ntasks=1", "--gres=gpu:1")
    long = "n" * 5000
    requests = ",".join(["gres:gpu:1"] * 500)
    updates = (
        *(f"TresPerNode={requests}", f"TresPerJob={requests}", f"Licenses={','.join(['matlab:1'] * 500)}"),
        *(f"Partition={','.join(['pollux'] * 500)}", f"Account={long}", f"QOS={long}", f"JobName={long}"),
    )
    accepted = [u[:40] for u in updates if user.run("scontrol", "update", f"JobId={job}", u).returncode == 0]
    assert accepted == []
    form = jobs_query().format
    assert (
        len(user.run("squeue", "--noheader", f"--jobs={job}", SQUEUE_FORMAT2=form).stdout) < MOST_OF_A_RECORD
    )


def test_lists_of_dependencies_are_not_printed_and_still_known(user: User) -> None:
    first = user.submit("", "--ntasks=1", "--array=0-49")
    waits = "--dependency=afterok:" + ":".join(f"{first}_{task}" for task in range(50))
    second = user.submit("", "--ntasks=1", "--array=0-49", waits)
    query = jobs_query()
    words = ("squeue", "--all", "--noheader", "--array", f"--jobs={first},{second}")
    answer = user.run(*words, SQUEUE_FORMAT2=query.format).stdout
    whole = user.run(*words, SQUEUE_FORMAT2=query.format.replace("Dependency:1<", "Dependency:<")).stdout
    assert answer.count(query.end) == whole.count(query.end) == 100
    assert len(answer) < MOST_OF_A_RECORD * 100
    assert len(whole) > len(answer) + 50 * 50 * len("afterok:1_1")
    jobs = ScontrolClient(conf=user.cluster.slurm_conf).observe().jobs
    dependent = {job.array[0]: job.dependent for job in jobs if job.array is not None}
    assert dependent[int(first)] is False
    assert dependent[int(second)] is True
