"""Least privilege on real parts.

polluxd is an Operator of slurmdbd without root, and its jobs belong to an ordinary user.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.model import JobState, Step

from .conftest import Loop, identity, loop_on, polluxd
from .elastic import Elastic

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@contextmanager
def site(scratch: Path, name: str, nodes: int, gpus_per_node: int) -> Iterator[Loop]:
    """Start a cluster with slurmdbd, an unprivileged polluxd, and a job owner.

    polluxd runs as `pollux`, an Operator of slurmdbd. The jobs belong to the user nobody.
    """
    folder = scratch / f"{name}-jobs"
    folder.mkdir()
    folder.chmod(0o1777)
    reach = [sys.executable, "-c", "import polluxd, pollux"]
    if subprocess.run(reach, check=False, cwd="/", capture_output=True, **identity("nobody")).returncode:
        pytest.skip(f"an ordinary user cannot reach {sys.executable}: clone to where others may read")
    with DevCluster(
        scratch / name,
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        lease_s=60,
        publish_interval_s=1.0,
        accounting=True,
        daemon_user="pollux",
    ) as cluster:
        daemon = polluxd(cluster, folder, training_timeout=150.0, cooldown=1.0)
        yield from loop_on(cluster, daemon, folder, user="nobody")


@pytest.fixture
def whole(scratch: Path) -> Iterator[Loop]:
    with site(scratch, "rights", nodes=2, gpus_per_node=4) as made:
        yield made


@pytest.fixture
def lending(scratch: Path) -> Iterator[Loop]:
    with site(scratch, "lending", nodes=3, gpus_per_node=1) as made:
        yield made


def test_an_operator_resizes_an_ordinary_users_job_in_place(lending: Loop) -> None:
    """The user submits the companion, and the Operator places it.

    The Operator also takes nodes back. A companion of the same user that guessed the id of the move, but not the nonce
    of its order, is ended: it has the lower job id, as it is submitted before the agent hears of its order.
    """
    job = Elastic(lending, "lent", "#POLLUX min-gpus=2 max-gpus=2")
    job.begin()
    first, second = job.nodes
    (third,) = set(lending.cluster.node_names) - set(job.nodes)
    number = job.order("resize", (first, second, third))
    claim = f"#POLLUX companion-of={job.job_id} attempt=0 move={number} nonce={'0' * 32}"
    forged = lending.sbatch("forged", "sleep 600", directive=claim)
    assert job.moved(number).step is Step.TRAINING, job.move(number).detail
    job.nodes = (first, second, third)
    lending.until(lambda: lending.job(forged).state is JobState.CANCELLED, why="the forged companion's end")
    (companion,) = job.companions()
    assert (companion.user, companion.nodes) == ("nobody", (third,))
    assert companion.job_id != forged
    job.go("resize", first, third)
    assert (job.slurm.nodes, job.slurm.restart_count) == ((first,), 0)
    job.go("resize", first)
    job.alone("its node was given back")
    assert job.end().repeated == 0


def test_polluxd_without_root_moves_an_ordinary_users_job(whole: Loop) -> None:
    job_id = whole.train("ordinary", 16)
    foreign = whole.sbatch("foreign", "sleep 20", directive=None)
    whole.until(lambda: whole.completed_moves(job_id) >= 1, why="a move")
    pid = whole.daemon.pid
    assert pid is not None
    assert os.stat(f"/proc/{pid}").st_uid == pwd.getpwnam("pollux").pw_uid
    assert os.stat(whole.cluster.hooks.heartbeat_file).st_uid == pwd.getpwnam("pollux").pw_uid
    refused = subprocess.run(
        ["scontrol", "update", f"jobid={job_id}", "StartTime=now+1000"],
        env={**os.environ, **whole.cluster.client_environment},
        capture_output=True,
        text=True,
        check=False,
        **identity("nobody"),
    )
    assert refused.returncode != 0, "geometry and lease are polluxd's, not the user's"
    assert whole.trained(job_id, "ordinary", 16).restart_count >= 1
    assert os.stat(whole.folder / "ordinary.json").st_uid == pwd.getpwnam("nobody").pw_uid
    assert whole.completed(foreign).restart_count == 0
    # slurmdbd has the record that an administrator would look at; slurmctld sends it there in its own time.
    ask = ("sacct", "-j", str(job_id), "-n", "-X", "-P", "-o", "user,state")
    whole.until(
        lambda: whole.cluster.command(*ask).split() == ["nobody|COMPLETED"], why="the accounting record"
    )
