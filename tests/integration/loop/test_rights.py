"""An administrator's word counts, and what one job holds beyond its own request gives way to others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.model import JobState, Step

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


def gpus(loop: Loop, job_id: int) -> int:
    return sum(loop.job(job_id).gpus_per_node_held.values())


@pytest.mark.parametrize(("words", "node"), [("ExcNodeList=n1", "n2"), ("ReqNodeList=n2", "n2")])
def test_nodes_that_an_administrator_gives_a_waiting_job_count(loop: Loop, words: str, node: str) -> None:
    waits = loop.sbatch("waits", "sleep 600", directive="#SBATCH --hold\n#POLLUX max-gpus=1")
    loop.cluster.command("scontrol", "update", f"jobid={waits}", words)
    loop.cluster.command("scontrol", "release", str(waits))
    loop.until(lambda: loop.job(waits).state is JobState.RUNNING, 60, why="its start")
    assert loop.job(waits).nodes == (node,)
    assert len(loop.store.moves(waits)) == 1


def test_a_throttle_that_is_raised_lets_more_tasks_run(loop: Loop) -> None:
    array = loop.sbatch(
        "tasks", "sleep 600", directive="#SBATCH --array=0-3%1 --open-mode=append\n#POLLUX max-gpus=1"
    )

    def running() -> int:
        jobs = loop.slurm.observe().jobs
        return sum(bool(j.array and j.array[0] == array and j.state is JobState.RUNNING) for j in jobs)

    loop.until(lambda: running() == 1, 60, why="the first task")
    loop.cluster.command("scontrol", "update", f"jobid={array}", "ArrayTaskThrottle=3")
    loop.until(lambda: running() == 3, 60, why="three tasks at a time")
    told = loop.daemon.command("polluxctl", "explain", f"{array}_1")
    assert told.returncode == 0, told.stderr


def test_several_nodes_need_no_number_of_gpus(loop: Loop) -> None:
    script = loop.folder / "several.sbatch"
    script.write_text("#!/bin/sh\n#POLLUX max-gpus=8\nsleep 600\n")
    options = ("--parsable", "--open-mode=append", "--output=/dev/null")
    for words in ("--nodes=2", "--nodelist=n1,n2"):
        job = int(loop.cluster.command("sbatch", *options, words, str(script)))
        loop.submitted.append(job)
        loop.until(lambda job=job: loop.job(job).state is JobState.RUNNING, 60, why=f"the start by {words}")


@pytest.fixture
def threaded(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster of one node of six cores with two threads each."""
    site = SiteLines(nodes={"n1": "Sockets=1 CoresPerSocket=6 ThreadsPerCore=2"})
    with DevCluster(
        scratch / "threaded", nodes=1, cpus_per_node=12, lease_s=60, publish_interval_s=1.0, site=site
    ) as cluster:
        yield from loop_on(cluster, polluxd(cluster, tmp_path, cooldown=1.0), tmp_path)


def test_a_shrink_leaves_whole_cores_to_another_job(threaded: Loop) -> None:
    """Three GPUs of three CPUs take five cores, and the other job needs two of six."""
    cores = "#SBATCH --cpus-per-task=3"
    # Steps that are long beside what the machine's other load adds: two GPUs then do more than one.
    grown = threaded.train("cores", 10000, "--alpha 0.2", directive=f"{cores}\n#POLLUX")
    threaded.until(lambda: gpus(threaded, grown) == 4, why="the growth over the node")
    other = threaded.sbatch("beside", "sleep 600", directive=f"{cores}\n#POLLUX max-gpus=1")
    threaded.until(lambda: threaded.job(other).state is JobState.RUNNING, 100, why="the other job's start")
    threaded.until(lambda: gpus(threaded, grown) == 2, 60, why="the training beside it")
    assert all(move.step is not Step.FAILED for move in threaded.store.moves(grown))
