"""The whole loop on real parts.

Slurm, Postgres and polluxd are real, and sbatch submits the trainings.
"""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from contrib.devcluster import DevCluster, Polluxd
from polluxd.apply.placed import held
from polluxd.errors import LeaderLost, StoreRejected
from polluxd.model import NO_PLACEMENT, JobState, Move, Placement, Step
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import Store

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(sys.executable).parent


def identity(user: str) -> dict[str, Any]:
    """Return the arguments with which subprocess runs a command as `user`.

    The command keeps none of root's groups.
    """
    account = pwd.getpwnam(user)
    return {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []} if account.pw_uid else {}


def digits(epochs: float) -> str:
    """Return the options of a training on digits, of about 45 steps of 0.05 s an epoch on one GPU."""
    return f"--epochs {epochs:g} --alpha 0.03 --beta 0.0005 --sync 0.01 0.02"


def polluxd(
    cluster: DevCluster,
    folder: Path,
    *,
    training_timeout: float = 60.0,
    cooldown: float = 5.0,
    interval: float = 5.0,
    drain_timeout: float = 30.0,
) -> Polluxd:
    """polluxd as these tests want it: it hears soon of an outage, and trainings are to be seen growing."""
    return Polluxd(
        cluster,
        folder,
        slurm={"timeout_s": 3},
        cycle={"interval_s": interval, "busy_poll_s": 0.2, "leader_lease_s": 5},
        moves={
            "cooldown_s": cooldown,
            "training_timeout_s": training_timeout,
            "drain_timeout_s": drain_timeout,
            "own_loop_rest": 0,
        },
        policy={"start_gpus": 1},
    )


@dataclass
class Loop:
    """A cluster with polluxd on it."""

    cluster: DevCluster
    daemon: Polluxd
    folder: Path
    user: str = "root"
    """Who submits."""
    submitted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.slurm = ScontrolClient(conf=self.cluster.slurm_conf, timeout=10)
        self.store = Store(self.cluster.database_url, self.cluster.cluster_name)

    def sbatch(
        self, name: str, body: str, *, directive: str | None = "#POLLUX min-gpus=1", gpus: int = 1
    ) -> int:
        done = self.try_sbatch(name, body, directive=directive, gpus=gpus)
        assert done.returncode == 0, done.stderr
        job_id = int(done.stdout.split()[-1])
        self.submitted.append(job_id)
        return job_id

    def try_sbatch(
        self, name: str, body: str, *, directive: str | None, gpus: int = 1
    ) -> subprocess.CompletedProcess[str]:
        script = self.folder / f"{name}.sbatch"
        script.write_text(
            f"#!/bin/bash\n#SBATCH --job-name={name} --nodes=1 --gpus-per-node={gpus} --ntasks-per-node=1\n"
            f"#SBATCH --output={self.folder}/{name}.log --cpus-per-task=1\n{directive or ''}\n"
            f"export PATH={BIN}:$PATH POLLUX_CHECKPOINT_DIR={self.folder}/checkpoints-{name}\n"
            f"cd {ROOT}\n{body}\n"
        )
        return subprocess.run(
            ["sbatch", str(script)],
            env={**os.environ, **self.cluster.client_environment},
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            **identity(self.user),
        )

    def train(
        self, name: str, epochs: float, *options: str, directive: str | None = "#POLLUX min-gpus=1"
    ) -> int:
        """A training on digits."""
        words = ("pollux run contrib/examples/digits_mlp.py", digits(epochs))
        body = " ".join([*words, f"--result {self.folder}/{name}.json", *options])
        return self.sbatch(name, body, directive=directive)

    def job(self, job_id: int) -> SlurmJob:
        return self.slurm.jobs([job_id])[job_id]

    def until(self, what: Callable[[], object], seconds: float = 200.0, *, why: str = "") -> None:
        # Of a quiet machine. Waiting for longer costs only a test that fails.
        seconds *= 3
        deadline = time.monotonic() + seconds
        while not what():
            if time.monotonic() > deadline:
                tail = self.daemon.log.read_text()[-3000:]
                logs = "\n".join(f"{p.name}: {p.read_text()[-600:]}" for p in self.folder.glob("*.log"))
                pytest.fail(f"not within {seconds:.0f} s: {why}\n{tail}\n{logs}")
            time.sleep(0.2)

    def completed(self, job_id: int, seconds: float = 200.0) -> SlurmJob:
        """Wait for the end of a job, which must be a good one."""
        self.until(lambda: self.job(job_id).state.finished, seconds, why=f"the end of job {job_id}")
        ended = self.job(job_id)
        assert ended.state is JobState.COMPLETED
        return ended

    def trained(self, job_id: int, name: str, epochs: float, seconds: float = 200.0) -> SlurmJob:
        """Wait for the good end of a training of so many epochs, requeued as often as moves asked for it."""
        ended = self.completed(job_id, seconds)
        assert self.result(name)["epochs"] == pytest.approx(epochs, abs=0.01)
        assert ended.restart_count == self.requeues(job_id)
        return ended

    def left_alone(self, job_id: int) -> SlurmJob:
        """Check that polluxd has not touched a plain job."""
        plain = self.job(job_id)
        assert (plain.restart_count, plain.admin_comment, plain.spec) == (0, "", None)
        return plain

    def plan(self, job_id: int, path: str, source: Placement | None, target: Placement) -> Move:
        """Have polluxd move a job from `source`, or from where it is; return the move once it is written."""
        planned: list[Move] = []

        def written() -> bool:
            job, leader = self.job(job_id), self.store.leader()
            here = source or held(job)
            assert not job.state.finished, f"it ended before it could be moved: {job.raw_state}"
            if leader is None or not here:
                return False
            words = (job_id, job.restart_count, path, here, target, "by the test", leader.epoch)
            try:
                planned.append(self.store.plan_move(*words))
            except (StoreRejected, LeaderLost):  # another move is under way, or the leader has changed
                return False
            return True

        self.until(written, why=f"a {path} to be planned")
        return planned[0]

    def park(self, job_id: int) -> None:
        """Have polluxd send a running job back to the queue.

        A plan does the same when there are more jobs than GPUs.
        """
        self.plan(job_id, "park", None, NO_PLACEMENT)

    def explained(self, job_id: int, words: str, seconds: float = 60.0) -> None:
        self.daemon.explained(self.store, job_id, words, 3 * seconds)

    def completed_moves(self, job_id: int) -> int:
        """How many moves of a running job have ended well."""
        return sum(m.path != "start" and m.step is Step.TRAINING for m in self.store.moves(job_id))

    def completed_starts(self, job_id: int) -> int:
        """How many starts of a job have ended well."""
        return sum(m.path == "start" and m.step is Step.TRAINING for m in self.store.moves(job_id))

    def requeues(self, job_id: int) -> int:
        """How often a move, finished or not, has sent the job back to the queue."""
        return sum(Step.REQUEUED in move.times for move in self.store.moves(job_id))

    def result(self, name: str) -> Mapping[str, float]:
        found: Mapping[str, float] = json.loads((self.folder / f"{name}.json").read_text())
        return found

    def cancel_all(self) -> None:
        if self.submitted:
            self.cluster.command("scancel", *map(str, self.submitted))
            self.until(lambda: all(self.job(j).state.finished for j in self.submitted), why="scancel")
        self.submitted.clear()


@pytest.fixture(scope="module")
def loop_cluster(scratch: Path) -> Iterator[DevCluster]:
    with DevCluster(scratch / "loop", nodes=2, lease_s=60, publish_interval_s=1.0) as cluster:
        yield cluster


@pytest.fixture
def loop(loop_cluster: DevCluster, tmp_path: Path) -> Iterator[Loop]:
    yield from loop_on(loop_cluster, polluxd(loop_cluster, tmp_path), tmp_path)


@pytest.fixture(scope="session")
def elastic_cluster(scratch: Path) -> Iterator[DevCluster]:
    """Start a cluster of five nodes with one GPU each, and slurmdbd.

    Every placement has whole nodes, and each rank has its own node. slurmdbd lets jobs shrink.
    """
    with DevCluster(
        scratch / "elastic", nodes=5, gpus_per_node=1, lease_s=60, publish_interval_s=1.0, accounting=True
    ) as cluster:
        yield cluster


@pytest.fixture
def elastic_loop(elastic_cluster: DevCluster, tmp_path: Path) -> Iterator[Loop]:
    yield from loop_on(
        elastic_cluster, polluxd(elastic_cluster, tmp_path, training_timeout=150.0, cooldown=1.0), tmp_path
    )


def loop_on(cluster: DevCluster, daemon: Polluxd, folder: Path, user: str = "root") -> Iterator[Loop]:
    """Start polluxd on a cluster; end its jobs and itself when the test has ended."""
    daemon.start()
    made = Loop(cluster, daemon, folder, user=user)
    try:
        yield made
        made.cancel_all()
    finally:
        made.daemon.stop()
        made.store.close()
