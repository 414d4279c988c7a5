"""Least privilege on real parts.

polluxd is an Operator of slurmdbd without root, and its jobs belong to an ordinary user.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.model import JobState, Step

from .conftest import Loop, identity, loop_on, polluxd
from .elastic import Elastic

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def lending(scratch: Path) -> Iterator[Loop]:
    """Start a cluster with slurmdbd, an unprivileged polluxd, and a job owner.

    polluxd runs as `pollux`, an Operator of slurmdbd. The jobs belong to the user nobody.
    """
    folder = scratch / "lending-jobs"
    folder.mkdir()
    folder.chmod(0o1777)
    reach = [sys.executable, "-c", "import polluxd, pollux"]
    if subprocess.run(reach, check=False, cwd="/", capture_output=True, **identity("nobody")).returncode:
        pytest.skip(f"an ordinary user cannot reach {sys.executable}: clone to where others may read")
    with DevCluster(
        scratch / "lending",
        nodes=4,
        gpus_per_node=1,
        lease_s=60,
        publish_interval_s=1.0,
        accounting=True,
        daemon_user="pollux",
    ) as cluster:
        daemon = polluxd(cluster, folder, training_timeout=150.0, cooldown=1.0)
        yield from loop_on(cluster, daemon, folder, user="nobody")


def test_an_operator_resizes_an_ordinary_users_job_in_place_and_through_the_queue(lending: Loop) -> None:
    """The user submits the companion, and the Operator places it.

    The Operator also takes nodes back. A companion of the same user that guessed the id of the move, but not the nonce
    of its order, is ended: it has the lower job id, as it is submitted before the agent hears of its order.
    """
    job = Elastic(lending, "lent", "#POLLUX min-gpus=2 max-gpus=2")
    job.begin()
    first, second = job.nodes
    third, fourth = sorted({*lending.cluster.node_names} - {*job.nodes})
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
    job.go("requeue", fourth)
    assert (job.slurm.nodes, job.slurm.restart_count) == ((fourth,), 1)
    assert lending.daemon.pid is not None
    for path in (f"/proc/{lending.daemon.pid}", lending.cluster.hooks.heartbeat_file):
        assert os.stat(path).st_uid == pwd.getpwnam("pollux").pw_uid
    assert job.end().repeated == 0
