"""Agents and a real gateway: orders, outages, and several gateways."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.model import JobState, Move, Step

from .conftest import Loop, digits, loop_on, polluxd

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def pair_cluster(scratch: Path) -> Iterator[DevCluster]:
    """Start a cluster with two gateways behind one setting."""
    with DevCluster(scratch / "pair", nodes=2, lease_s=60, publish_interval_s=1.0, gateways=2) as cluster:
        yield cluster


@pytest.fixture
def pair(pair_cluster: DevCluster, tmp_path: Path) -> Iterator[Loop]:
    yield from loop_on(pair_cluster, polluxd(pair_cluster, tmp_path), tmp_path)


def park_of(loop: Loop, job_id: int) -> Move:
    """The newest move of a job, which parks it."""
    newest = loop.store.moves(job_id)[-1]
    assert newest.path == "park"
    return newest


def test_an_order_waits_for_the_gateway_and_is_carried_out_once(pair: Loop) -> None:
    gateways = pair.cluster.gateways
    job_id = pair.train("waits", 16)
    # A report of the first step ends the start: polluxd can park the job while the gateways are away.
    pair.until(lambda: pair.completed_starts(job_id), why="the start's end")
    for number in (0, 1):
        gateways.stop(number, kill=True)
    try:
        pair.park(job_id)
        move = park_of(pair, job_id).id
        pair.until(lambda: park_of(pair, job_id).step is Step.DRAINING, why="the order")
        attempt = pair.job(job_id).restart_count
        time.sleep(3)
        assert park_of(pair, job_id).step is Step.DRAINING, "nobody has passed the order on"
        assert (pair.job(job_id).state, pair.job(job_id).restart_count) == (JobState.RUNNING, attempt)
    finally:
        for number in (0, 1):
            gateways.start(number)
    pair.until(
        lambda: any(m.id == move and Step.REQUEUED in m.times for m in pair.store.moves(job_id)),
        why="the drain",
    )
    pair.trained(job_id, "waits", 16)


def test_kill_9_of_the_gateways_again_and_again_loses_no_order(pair: Loop) -> None:
    job_id = pair.train("stormy", 40)
    pair.until(lambda: pair.completed_starts(job_id), why="the start's end")
    chance = random.Random(11)
    kills, parks = 0, 0
    deadline = time.monotonic() + 400
    while not pair.job(job_id).state.finished:
        assert time.monotonic() < deadline
        moves = pair.store.moves(job_id)
        if parks < 2 and pair.job(job_id).state is JobState.RUNNING and all(m.step.terminal for m in moves):
            pair.park(job_id)
            parks += 1
        number = kills % 2
        pair.cluster.gateways.stop(number, kill=True)
        time.sleep(chance.uniform(0.0, 1.5))
        pair.cluster.gateways.start(number)
        kills += 1
    assert kills >= 5
    assert parks == 2
    assert pair.trained(job_id, "stormy", 40).restart_count >= 1


def test_a_script_without_a_launcher_proves_itself_by_munge(loop: Loop) -> None:
    job_id = loop.sbatch(
        "direct",
        f"srun --ntasks=1 {sys.executable} contrib/examples/digits_mlp.py {digits(6)}",
        directive="#POLLUX max-gpus=1",
    )
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    loop.completed(job_id)


def test_sigusr1_is_the_users_in_a_pollux_job_too(loop: Loop) -> None:
    job_id = loop.train("signalled", 400, directive="#POLLUX max-gpus=1")
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    loop.cluster.command("scancel", "--signal=USR1", str(job_id))
    log = loop.folder / "signalled.log"
    loop.until(lambda: "SIGUSR1: checkpoint of step" in log.read_text(), why="the save")
    assert loop.job(job_id).state is JobState.RUNNING, "Slurm ends the job at its time limit"
    assert "ended by SIGUSR1" not in log.read_text()


HIDING = """\
#!/bin/sh
# A container without munge: neither its socket nor Slurm's configuration is there.
exec unshare --mount sh -c 'mount -t tmpfs none {munge} && mount -t tmpfs none {etc} && exec "$@"' sh "$@"
"""


def test_ranks_in_a_container_without_munge_report_by_the_launchers_token(loop: Loop, scratch: Path) -> None:
    container = scratch / "hiding"
    munge = loop.cluster.directory / "munge"
    container.write_text(HIDING.format(munge=munge, etc=loop.cluster.slurm_conf.parent))
    container.chmod(0o755)
    job_id = loop.sbatch(
        "contained",
        f"pollux run --container {container} contrib/examples/digits_mlp.py {digits(8)}",
        directive="#POLLUX max-gpus=1 resize=requeue",
    )
    loop.until(lambda: loop.store.reports().get(job_id), why="a report")
    loop.completed(job_id)
    assert "no token" not in (loop.folder / "contained.log").read_text()
