"""Least privilege on real parts: polluxd as an Operator of slurmdbd without root, jobs of an ordinary user."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contrib.devcluster import DevCluster
from polluxd.slurm.protocol import JobState

from .conftest import Daemon, Loop, identity
from .test_loop import completed_moves

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


@pytest.fixture
def site(scratch: Path) -> Iterator[Loop]:
    folder = scratch / "unprivileged"
    folder.mkdir()
    folder.chmod(0o777)
    reach = [sys.executable, "-c", "import polluxd, pollux"]
    if subprocess.run(reach, check=False, cwd="/", capture_output=True, **identity("nobody")).returncode:
        pytest.skip(f"an ordinary user cannot reach {sys.executable}: clone to where others may read")
    with DevCluster(
        scratch / "rights",
        nodes=2,
        lease_s=60,
        publish_interval_s=1.0,
        accounting=True,
        daemon_user="pollux",
    ) as cluster:
        daemon = Daemon(cluster, folder)
        migrated = daemon.command("polluxd", "migrate")
        assert migrated.returncode == 0, migrated.stderr
        daemon.start()
        made = Loop(cluster, daemon, folder, user="nobody")
        try:
            yield made
            made.cancel_all()
        finally:
            daemon.end()
            made.store.close()


def test_polluxd_without_root_moves_an_ordinary_users_job(site: Loop) -> None:
    job_id = site.train("ordinary", 16)
    foreign = site.sbatch("foreign", "sleep 20", directive=None)
    site.until(lambda: completed_moves(site, job_id) >= 1, why="a re-allocation")
    pid = site.daemon.pid
    assert pid is not None
    assert os.stat(f"/proc/{pid}").st_uid == pwd.getpwnam("pollux").pw_uid
    assert os.stat(site.cluster.hooks.heartbeat_file).st_uid == pwd.getpwnam("pollux").pw_uid
    refused = subprocess.run(
        ["scontrol", "update", f"jobid={job_id}", "StartTime=now+1000"],
        env={**os.environ, **site.cluster.client_environment},
        capture_output=True,
        text=True,
        check=False,
        **identity("nobody"),
    )
    assert refused.returncode != 0, "geometry and lease are polluxd's, not the user's"
    site.until(lambda: site.job(job_id).state.finished, why="the training's end")
    ended = site.job(job_id)
    assert ended.state is JobState.COMPLETED
    assert ended.restart_count == site.requeues(job_id) >= 1
    assert site.result("ordinary")["epochs"] == pytest.approx(16, abs=0.01)
    assert os.stat(site.folder / "ordinary.json").st_uid == pwd.getpwnam("nobody").pw_uid
    site.until(lambda: site.job(foreign).state.finished, why="the foreign job's end")
    assert (site.job(foreign).state, site.job(foreign).restart_count) == (JobState.COMPLETED, 0)
    # slurmdbd has the record that an administrator would look at; slurmctld sends it there in its own time.
    ask = ("sacct", "-j", str(job_id), "-n", "-X", "-P", "-o", "user,state")
    site.until(
        lambda: site.cluster.command(*ask).split() == ["nobody|COMPLETED"], why="the accounting record"
    )
