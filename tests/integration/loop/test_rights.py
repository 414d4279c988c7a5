"""What one job holds beyond its own request gives way to others, and an administrator's word counts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.model import JobState, Step

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def shared_site(scratch: Path) -> Iterator[DevCluster]:
    """Start a cluster of two nodes with slurmdbd, for three users."""
    site = SiteLines(lines=("AccountingStorageEnforce=associations,limits,qos",))
    with DevCluster(
        scratch / "rights", nodes=2, lease_s=60, publish_interval_s=1.0, accounting=True, site=site
    ) as cluster:
        for words in (
            ("add", "account", "lab", "GrpTRES=gres/gpu=6"),
            ("add", "account", "open"),
            ("add", "user", "root", "account=lab,open"),
            ("add", "user", "nobody", "account=lab,open"),
            ("add", "user", "games", "account=open"),
        ):
            cluster.command("sacctmgr", "-i", *words)
        yield cluster


@pytest.fixture
def shared(shared_site: DevCluster, scratch: Path, request: pytest.FixtureRequest) -> Iterator[Loop]:
    folder = scratch / f"shared-{request.node.name}"
    folder.mkdir()
    folder.chmod(0o1777)
    yield from loop_on(shared_site, polluxd(shared_site, folder, cooldown=1.0), folder)


def gpus(loop: Loop, job_id: int) -> int:
    return sum(loop.job(job_id).gpus_per_node_held.values())


def test_a_hold_keeps_no_more_than_the_equal_share(shared: Loop) -> None:
    opened = "#SBATCH --account=open"
    plain = shared.sbatch("plain", "sleep 600", directive=opened, gpus=4)
    shared.until(lambda: shared.job(plain).state is JobState.RUNNING, 60, why="the plain job's start")
    grown = shared.train("grown", 10000, directive=f"{opened}\n#POLLUX")
    shared.until(lambda: gpus(shared, grown) == 4, why="the growth over the other node")
    shared.cluster.command("scontrol", "hold", str(grown))
    others = []
    for shared.user in ("nobody", "games"):
        directive = f"{opened} --open-mode=append\n#POLLUX max-gpus=1"
        others.append(shared.sbatch(f"of-{shared.user}", "sleep 600", directive=directive))
    shared.until(
        lambda: all(shared.job(other).state is JobState.RUNNING for other in others),
        150,
        why="the other users' starts",
    )
    assert gpus(shared, grown) <= 2, "8 GPUs for three users"


def test_growth_into_an_accounts_limit_gives_way_to_a_plain_job(shared: Loop) -> None:
    grown = shared.train("within", 10000, directive="#SBATCH --account=lab\n#POLLUX min-gpus=1")
    shared.until(lambda: gpus(shared, grown) >= 4, why="the growth into the account's limit")
    shared.user = "nobody"
    plain = shared.sbatch("plain", "sleep 600", directive="#SBATCH --account=lab", gpus=4)
    shared.until(lambda: shared.job(plain).state is JobState.RUNNING, 90, why="the plain job's start")
    shared.until(lambda: gpus(shared, grown) <= 2, 60, why="the training within its part of the limit")


@pytest.mark.parametrize(("words", "node"), [("ExcNodeList=n1", "n2"), ("ReqNodeList=n2", "n2")])
def test_nodes_that_an_administrator_gives_a_waiting_job_count(shared: Loop, words: str, node: str) -> None:
    waits = shared.sbatch("waits", "sleep 600", directive="#SBATCH --hold --account=open\n#POLLUX max-gpus=1")
    shared.cluster.command("scontrol", "update", f"jobid={waits}", words)
    shared.cluster.command("scontrol", "release", str(waits))
    shared.until(lambda: shared.job(waits).state is JobState.RUNNING, 60, why="its start")
    assert shared.job(waits).nodes == (node,)
    assert len(shared.store.moves(waits)) == 1


def test_a_throttle_that_is_raised_lets_more_tasks_run(shared: Loop) -> None:
    array = shared.sbatch(
        "tasks",
        "sleep 600",
        directive="#SBATCH --array=0-3%1 --open-mode=append --account=open\n#POLLUX max-gpus=1",
    )

    def running() -> int:
        jobs = shared.slurm.observe().jobs
        return sum(bool(j.array and j.array[0] == array and j.state is JobState.RUNNING) for j in jobs)

    shared.until(lambda: running() == 1, 60, why="the first task")
    shared.cluster.command("scontrol", "update", f"jobid={array}", "ArrayTaskThrottle=3")
    shared.until(lambda: running() == 3, 60, why="three tasks at a time")
    told = shared.daemon.command("polluxctl", "explain", f"{array}_1")
    assert told.returncode == 0, told.stderr


def test_several_nodes_need_no_number_of_gpus(shared: Loop) -> None:
    script = shared.folder / "several.sbatch"
    script.write_text("#!/bin/sh\n#POLLUX max-gpus=8\nsleep 600\n")
    options = ("--parsable", "--account=open", "--open-mode=append", "--output=/dev/null")
    for words in ("--nodes=2", "--nodelist=n1,n2"):
        job = int(shared.cluster.command("sbatch", *options, words, str(script)))
        shared.submitted.append(job)
        shared.until(
            lambda job=job: shared.job(job).state is JobState.RUNNING, 60, why=f"the start by {words}"
        )


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
