"""Jobs that are resized without going through the queue, on real parts.

Every sample counts once, the processes that stay are the same ones, and users see one job.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from polluxd.model import JobState, Move, Step

from .conftest import Loop
from .elastic import Elastic, kill_processes

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]

REFUSING = """\
#!/bin/sh
# sbatch at a site that may forbid it from within jobs.
[ -e {folder}/forbidden ] && {{ echo "sbatch: error: not from a compute node" >&2; exit 1; }}
exec {sbatch} "$@"
"""

CONTAINER = """\
#!/bin/sh
# A container as far as `pollux run` can tell: mounts of its own, and a python3 that the batch script does not have.
exec unshare --mount env PATH={bin}:"$PATH" "$@"
"""


def free_nodes(elastic_loop: Loop, job: Elastic) -> list[str]:
    return [name for name in elastic_loop.cluster.node_names if name not in job.nodes]


def test_in_place_by_companions_and_by_nodes_given_back_and_then_through_the_queue(
    elastic_loop: Loop,
) -> None:
    job = Elastic(elastic_loop, "elastic", "#POLLUX min-gpus=2 max-gpus=2")
    job.begin()
    first, second = job.nodes
    third, fourth, fifth = free_nodes(elastic_loop, job)

    job.go("resize", first, second, third)
    job.go("resize", first, second, third, fourth)
    shown = json.loads(elastic_loop.daemon.command("polluxctl", "jobs", "--json").stdout)
    (row,) = [r for r in (shown if isinstance(shown, list) else shown["jobs"]) if r["gpus"]]
    assert (row["job_id"], row["gpus"]) == (job.job_id, 4)
    assert len(job.companions()) == 2
    assert {c.name for c in job.companions()} == {"elastic.companion"}

    job.go("resize", first, second, third)
    assert [c.nodes for c in job.companions()] == [(third,)]
    job.go("resize", first, third)  # a node of its own, while the companion stays
    assert job.slurm.nodes == (first,)
    job.steps_among(2)

    began = {each.pid: each.joined for each in job.ledgers()}
    sizes = sorted((began[pid], ranks) for pid, ranks in job.sizes().items())
    # Two processes of its own and two that joined, each from its first step to its last.
    assert sizes == [(False, [2, 3, 4, 3]), (False, [2, 3, 4, 3, 2]), (True, [3, 4, 3, 2]), (True, [4])]
    assert job.slurm.restart_count == 0
    costs = {c["id"]: c for c in elastic_loop.store.move_costs(job.job_id) if c["path"] == "resize"}
    assert len(costs) == 4
    assert all(cost["measured"] and cost["total_s"] > 0 for cost in costs.values())

    job.go("requeue", fourth, fifth)
    job.alone("it was requeued")
    assert job.slurm.restart_count == 1
    assert job.slurm.nodes == tuple(sorted((fourth, fifth)))
    job.go("resize", *first_of_all(job), first)
    lived = job.end()
    assert (lived.repeated, lived.launches) == (0, 2)
    job.alone("the job has ended")


def test_a_training_on_one_gpu_in_a_container_grows_in_place_by_companions_in_it(
    elastic_loop: Loop, scratch: Path
) -> None:
    container = scratch / "container"
    container.write_text(CONTAINER.format(bin=Path(sys.executable).parent))
    container.chmod(0o755)
    job = Elastic(elastic_loop, "contained", "#POLLUX min-gpus=1 max-gpus=1", container=container)
    job.begin()
    (first,) = job.nodes
    job.go("resize", first, *free_nodes(elastic_loop, job)[:2])
    job.steps_among(3)
    mounts = {os.readlink(f"/proc/{pid}/ns/mnt") for pid in job.sizes()}
    assert len(mounts) == 3, "each launcher in a container of its own"
    job.go("resize", first)
    job.steps_among(1)
    assert job.slurm.restart_count == 0
    assert os.readlink("/proc/self/ns/mnt") not in mounts
    assert job.end().repeated == 0


@pytest.mark.skipif(torch.__version__ < "2.13", reason="fully_shard is supported from torch 2.13 on")
def test_shards_move_to_a_companion_and_back(elastic_loop: Loop) -> None:
    job = Elastic(elastic_loop, "sharded", "#POLLUX min-gpus=2 max-gpus=2", options="--sharded")
    job.begin()
    first, second = job.nodes
    job.go("resize", first, second, *free_nodes(elastic_loop, job)[:1])
    job.steps_among(3)
    job.go("resize", first)
    job.steps_among(1)
    began = {each.pid: each.joined for each in job.ledgers()}
    sizes = sorted((began[pid], ranks) for pid, ranks in job.sizes().items())
    assert sizes == [(False, [2, 3]), (False, [2, 3, 1]), (True, [3])]
    lived = job.end()
    assert (lived.repeated, lived.launches) == (0, 1)


def first_of_all(job: Elastic) -> tuple[str, ...]:
    """The job's own nodes, the batch host first."""
    shown = job.slurm
    return (shown.batch_host, *(name for name in shown.nodes if name != shown.batch_host))


def test_polluxd_grows_in_place_by_itself_and_falls_back(elastic_loop: Loop) -> None:
    refusing = elastic_loop.folder / "bin"
    refusing.mkdir()
    (refusing / "sbatch").write_text(REFUSING.format(folder=refusing, sbatch=shutil.which("sbatch")))
    (refusing / "sbatch").chmod(0o755)
    directive = "#POLLUX min-gpus=2 max-gpus=4 gpu-counts=2,4"
    job = Elastic(elastic_loop, "decided", directive, first_in_path=refusing)
    job.begin(pinned=False)

    def made(path: str, step: Step, *, after: int = 0) -> list[Move]:
        moves = elastic_loop.store.moves(job.job_id)
        return [m for m in moves if m.path == path and m.step is step and m.id > after]

    elastic_loop.until(lambda: made("resize", Step.TRAINING), why="a growth in place, of polluxd's own")
    job.steps_among(4)
    assert job.slurm.restart_count == 0

    # The companion's nodes fail: the job goes on without them.
    job.pin()
    (companion,) = job.companions()
    newest = max(m.id for m in elastic_loop.store.moves(job.job_id))
    assert kill_processes(elastic_loop.cluster, companion.job_id)
    job.steps_among(2)
    assert job.slurm.restart_count == 0
    assert job.slurm.state is JobState.RUNNING

    # Growing again, it is not let submit another one: through the queue, then.
    (refusing / "forbidden").touch()
    job.pin("unpin")
    elastic_loop.until(lambda: made("requeue", Step.TRAINING, after=newest), why="a growth through the queue")
    refused = made("resize", Step.FAILED, after=newest)
    assert refused
    assert "not from a compute node" in refused[-1].detail
    assert job.slurm.restart_count == 1
    job.steps_among(4)
    job.end()
