"""A training that runs is stopped for no place that Slurm, the site or the job refuses; at most once for one cause.

Slurm's StartTime says how long a training stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster, SiteLines
from polluxd.apply.capacity import BACK
from polluxd.model import JobState, Placement, Step

from .conftest import Loop, loop_on, polluxd

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900)]


def went_back(loop: Loop, job_id: int, where: Placement, reason: str) -> None:
    """Wait until a refused job trains where it was; check that it was stopped once."""
    loop.until(
        lambda: any(m.reason.startswith(BACK) and m.step is Step.TRAINING for m in loop.store.moves(job_id)),
        why="the return",
    )
    assert loop.job(job_id).gpus_per_node_held == dict.fromkeys(where.nodes, where.gpus_per_node)
    refused = [m for m in loop.store.moves(job_id) if m.step is Step.FAILED]
    assert [reason in m.detail for m in refused] == [True], refused
    began = loop.job(job_id).start_time
    assert began is not None
    print(f"job {job_id} stood for {began - refused[0].times[Step.CHECKPOINTED]:.1f} s, by Slurm's StartTime")
    assert loop.requeues(job_id) == 1


@pytest.fixture
def limited(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster of two nodes with a QOS of 240 GPU minutes for a job."""
    site = SiteLines(lines=("AccountingStorageEnforce=associations,limits,qos",))
    with DevCluster(
        scratch / "minutes", nodes=2, lease_s=60, publish_interval_s=1.0, accounting=True, site=site
    ) as cluster:
        cluster.command("sacctmgr", "-i", "add", "qos", "jobmins", "MaxTRESMinsPerJob=gres/gpu=240")
        cluster.command("sacctmgr", "-i", "add", "account", "lab", "qos=jobmins", "defaultqos=jobmins")
        cluster.command("sacctmgr", "-i", "add", "user", "root", "account=lab", "defaultaccount=lab")
        yield from loop_on(cluster, polluxd(cluster, tmp_path, cooldown=1.0), tmp_path)


def test_a_growth_that_a_limit_forbids_stops_no_training(limited: Loop) -> None:
    lines = "#SBATCH --time=60 --account=lab --qos=jobmins\n#POLLUX min-gpus=4 max-gpus=8 resize=requeue"
    job_id = limited.train("minutes", 10000, directive=lines)
    limited.until(lambda: limited.completed_starts(job_id) == 1, why="the first step")
    move = limited.plan(job_id, "requeue", None, Placement(("n1", "n2"), 4))
    limited.until(lambda: limited.store.moves(job_id)[-1].step is Step.FAILED, why="the end of the move")
    (refused,) = (m for m in limited.store.moves(job_id) if m.id == move.id)
    assert "MaxTRESMinsPerJob=gres/gpu=240 of QOS jobmins" in refused.detail
    assert Step.DRAINING not in refused.times
    limited.explained(job_id, "allows no more")
    assert limited.job(job_id).restart_count == 0


def test_a_node_that_has_free_gpus_and_no_cpus_stops_a_training_once(loop: Loop) -> None:
    every = next(node.cpus for node in loop.slurm.observe().nodes if node.name == "n2")
    lines = f"#SBATCH --nodelist=n2 --cpus-per-task={every}"
    cpus = loop.sbatch("cpus", "sleep 600", directive=lines, gpus=0)
    loop.until(lambda: loop.job(cpus).state is JobState.RUNNING, why="the plain job's start")
    job_id = loop.train("placed", 10000, directive="#POLLUX max-gpus=1 resize=requeue")
    loop.until(lambda: loop.completed_starts(job_id) == 1, why="the first step")
    assert tuple(loop.job(job_id).gpus_per_node_held) == ("n1",)
    loop.plan(job_id, "requeue", None, Placement(("n2",), 1))
    went_back(loop, job_id, Placement(("n1",), 1), "Resources")


def test_a_job_that_cannot_save_gets_no_order_and_costs_nobody_anything(loop: Loop) -> None:
    locked = loop.sbatch(
        "locked",
        "export POLLUX_CHECKPOINT_DIR=/proc/none\npollux run contrib/examples/digits_mlp.py --epochs 10000 "
        "--alpha 0.03 --beta 0.0005 --sync 0.01 0.02",
        directive="#POLLUX max-gpus=4 resize=requeue",
    )
    loop.until(lambda: loop.completed_starts(locked) == 1, why="the first step")
    victim = loop.train("victim", 10000, directive="#POLLUX max-gpus=4 resize=requeue")
    loop.until(lambda: loop.completed_starts(victim) == 1, why="the other's first step")
    loop.explained(locked, "cannot be moved: no checkpoint c")  # can be, or could be written
    loop.until(lambda: loop.completed_moves(victim) >= 1, why="the other job's growth")
    assert not any(Step.DRAINING in m.times for m in loop.store.moves(locked))
    assert loop.job(locked).restart_count == 0


@pytest.fixture
def with_prolog(scratch: Path, tmp_path: Path) -> Iterator[Loop]:
    """Start a cluster of one node whose Prolog writes a line, and whose slurmd remembers attempts for 8 s."""
    log, prolog = tmp_path / "prologs", tmp_path / "prolog.sh"
    log.touch(mode=0o666)
    prolog.write_text(f"#!/bin/sh\necho $SLURM_JOB_ID >> {log}\n")
    prolog.chmod(0o755)
    place = scratch / "prolog"
    site = SiteLines(
        lines=(f"Prolog={prolog}", "PrologFlags=Alloc", f"AuthInfo=socket={place}/munge/socket,cred_expire=8")
    )
    with DevCluster(place, nodes=1, lease_s=60, publish_interval_s=1.0, site=site) as cluster:
        yield from loop_on(cluster, polluxd(cluster, tmp_path, cooldown=1.0), tmp_path)


def test_a_start_on_a_kept_node_has_its_prolog(with_prolog: Loop) -> None:
    loop = with_prolog
    job_id = loop.train("kept", 10000, directive="#POLLUX max-gpus=2 resize=requeue")
    loop.until(lambda: loop.completed_starts(job_id) == 1, why="the first step")
    for turn, gpus in enumerate((1, 2), 1):
        move = loop.plan(job_id, "requeue", None, Placement(("n1",), gpus))
        loop.until(
            lambda move=move: {m.id: m.step for m in loop.store.moves(job_id)}[move.id] is Step.TRAINING,
            why="the move",
        )
        begun = (loop.folder / "prologs").read_text().split().count(str(job_id))
        assert begun == turn + 1, f"{begun} prologs of {turn + 1} starts"
