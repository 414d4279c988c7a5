"""What users write in sbatch options holds for every placement.

One cluster with typed GPUs, features, two partitions and a reservation plays all cases.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.model import JobState, Step
from polluxd.slurm.protocol import SlurmJob

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]

NODES = ("n1", "n2", "n3", "n4", "n5")


@pytest.fixture(scope="module")
def varied_cluster(scratch: Path) -> Iterator[DevCluster]:
    """Start two nodes of a100, and one each of 2080ti, MIG and no type; the last is reserved."""
    site = SiteLines(
        gpu_types={"n1": "a100", "n2": "a100", "n3": "2080ti", "n4": "1g.5gb"},
        nodes={"n1": "Feature=ib,old", "n2": "Feature=ib,new", "n5": "Feature=new"},
        partitions={"other": "Nodes=n5"},
    )
    with DevCluster(
        scratch / "varied", nodes=5, gpus_per_node=2, lease_s=60, publish_interval_s=1.0, site=site
    ) as cluster:
        cluster.command(
            *("scontrol", "create", "reservation", "ReservationName=course", "StartTime=now", "Duration=60"),
            *("Nodes=n5", "Users=root", "Flags=ignore_jobs"),
        )
        yield cluster


@pytest.fixture
def varied(varied_cluster: DevCluster, tmp_path: Path) -> Iterator[Loop]:
    yield from loop_on(varied_cluster, polluxd(varied_cluster, tmp_path, cooldown=1.0), tmp_path)


def test_options_of_sbatch_hold_for_every_placement(varied: Loop) -> None:
    command = varied.cluster.command

    def submit(name: str, *options: str, directive: str = "#POLLUX max-gpus=1") -> int:
        lines = [f"#SBATCH {option}" for option in options]
        return varied.sbatch(name, "sleep 900", directive="\n".join([*lines, directive]), gpus=1)

    def on(nodes: set[str]) -> Callable[[SlurmJob], bool]:
        return lambda job: set(job.nodes) <= nodes

    cases: dict[str, tuple[int, Callable[[SlurmJob], bool]]] = {
        "type": (submit("type", "--gpus-per-node=2080ti:1"), on({"n3"})),
        "mig": (submit("mig", "--gpus-per-node=1g.5gb:1"), on({"n4"})),
        "constraint": (submit("constraint", "--constraint=ib&new"), on({"n2"})),
        "either": (submit("either", "--constraint=(old|new)&ib"), on({"n1", "n2"})),
        "reservation": (submit("reservation", "--reservation=course"), on({"n5"})),
        "nodelist": (submit("nodelist", "--nodelist=n3"), on({"n3"})),
        "exclude": (submit("exclude", "--exclude=n1,n2,n3,n5"), on({"n4"})),
        "partitions": (submit("partitions", "--partition=main,other", "--mincpus=4"), on({"n1", "n2"})),
    }
    for name, (job_id, right) in cases.items():
        varied.until(lambda j=job_id: varied.job(j).state is JobState.RUNNING, 60, why=f"the start of {name}")  # type: ignore[misc]
        assert right(varied.job(job_id)), f"{name} runs on {varied.job(job_id).nodes}"
        moves = varied.store.moves(job_id)
        assert [m.path for m in moves] == ["start"], f"{name}: polluxd placed it at once: {moves}"
    shown = command("scontrol", "show", "job", "-o", str(cases["partitions"][0]))
    assert "MinCPUsNode=4" in shown
    shown = command("scontrol", "show", "job", "-o", str(cases["type"][0]))
    assert "TresPerNode=gres:gpu:2080ti:1" in shown
    waits = submit("waits", "--constraint=old", directive="#POLLUX min-gpus=4")
    varied.explained(waits, "--constraint=old")
    varied.cancel_all()

    # Exclusive: all GPUs of a node, and no node that a plain job uses.
    plain = varied.sbatch("plain", "sleep 900", directive="#SBATCH --nodelist=n1", gpus=1)
    varied.until(lambda: varied.job(plain).state is JobState.RUNNING, why="the plain job")
    alone = submit("alone", "--exclusive", "--constraint=ib", directive="#POLLUX max-gpus=2")
    varied.until(lambda: varied.job(alone).state is JobState.RUNNING, 60, why="the exclusive job's start")
    assert varied.job(alone).gpus_per_node_held == {"n2": 2}
    varied.cancel_all()


def test_each_task_of_an_array_is_a_job_of_its_own(varied: Loop) -> None:
    words, go = ["#SBATCH --array=0-5%2", "#POLLUX max-gpus=1"], varied.folder / "go"
    body = f"until [ -e {go} ]; do sleep 0.2; done; sleep 3"
    first = varied.sbatch("sweep", body, directive="\n".join(words))
    most, done = 0, set[int]()

    def tasks() -> list[SlurmJob]:
        nonlocal most
        found = [job for job in varied.slurm.observe().jobs if job.array and job.array[0] == first]
        varied.submitted[:] = [job.job_id for job in found]
        most = max(most, sum(job.state is JobState.RUNNING for job in found))
        done.update(job.job_id for job in found if job.state is JobState.COMPLETED)
        return found

    varied.until(lambda: tasks() and most == 2, 60, why="two tasks")
    at = time.time()
    varied.until(lambda: tasks() and varied.store.cycles(1)[0].cycle.started_at > at, why="another decision")
    go.touch()
    varied.until(lambda: tasks() and len(done) == 6, 150, why="six tasks")
    assert most == 2
    for job_id in done:
        moves = varied.store.moves(job_id)
        assert [m.path for m in moves] == ["start"], "polluxd placed each task, each with a job id of its own"
        assert Step.STARTED in moves[0].times
    names = {job.name for job in tasks()}
    assert names == {f"sweep {first}_{task}" for task in range(6)}


def test_contiguous_nodes_follow_each_other_after_a_requeue_too(elastic_loop: Loop) -> None:
    def runs(job_id: int) -> tuple[str, ...]:
        elastic_loop.until(lambda: elastic_loop.job(job_id).state is JobState.RUNNING, 60, why="a start")
        return elastic_loop.job(job_id).nodes

    def plain(node: str) -> int:
        return elastic_loop.sbatch(f"plain-{node}", "sleep 900", directive=f"#SBATCH --nodelist={node}")

    second = plain("n2")
    runs(second)
    lines = "#SBATCH --contiguous\n#POLLUX min-gpus=2 max-gpus=2"
    job_id = elastic_loop.sbatch("row", "sleep 900", directive=lines)
    before = runs(job_id)
    assert before in {("n3", "n4"), ("n4", "n5")}
    fourth = plain("n4")
    elastic_loop.cluster.command("scancel", str(second))
    elastic_loop.cluster.command("scontrol", "requeue", str(job_id))
    assert runs(fourth) == ("n4",)
    elastic_loop.until(lambda: elastic_loop.job(job_id).restart_count == 1, why="the requeue")
    assert runs(job_id) in {("n1", "n2"), ("n2", "n3")}
    elastic_loop.cancel_all()
