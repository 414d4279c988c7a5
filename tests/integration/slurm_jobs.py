"""Jobs of a test on a private Slurm, moved as polluxd moves them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from contrib.devcluster import DevCluster
from contrib.devcluster.processes import wait_until
from polluxd.model import JobState
from polluxd.slurm.protocol import Geometry, SlurmClient, SlurmJob
from polluxd.slurm.scontrol import ScontrolClient

PATIENCE_S = 100.0


class SlurmJobs:
    """Submits jobs, whose scripts and outputs lie in `folder`, and ends them."""

    def __init__(self, cluster: DevCluster, folder: Path, client: SlurmClient | None = None) -> None:
        self.cluster, self.folder = cluster, folder
        self.client = client or ScontrolClient(conf=cluster.slurm_conf)
        self.ids: list[int] = []

    def run(
        self, *argv: str | bytes, user: str = "root", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a client command as a user."""
        return subprocess.run(
            argv,
            env=self.cluster.client_environment | environment,
            user=user,
            group="nogroup" if user == "nobody" else "root",
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )

    def sbatch(
        self, script: str, *options: str | bytes, user: str = "root", **environment: str
    ) -> subprocess.CompletedProcess[str]:
        path = self.folder / "job.sh"
        path.write_text(script)
        words = ("sbatch", "--parsable", f"--output={self.folder}/out.%j", "--chdir=/tmp", *options)
        done = self.run(*words, str(path), user=user, **environment)
        if done.returncode == 0:
            self.ids.append(int(done.stdout))
        return done

    def submit(self, script: str, *options: str | bytes, user: str = "root") -> int:
        done = self.sbatch(script, *options, user=user)
        assert done.returncode == 0, done.stderr
        return self.ids[-1]

    def job(self, job_id: int) -> SlurmJob:
        return self.client.jobs([job_id])[job_id]

    def shown(self, job_id: int) -> str:
        """Return scontrol's record of a job, on one line."""
        return self.cluster.command("scontrol", "-o", "show", "job", str(job_id))

    def wait(self, job_id: int, state: JobState) -> SlurmJob:
        wait_until(lambda: self.job(job_id).state is state, PATIENCE_S, f"job {job_id} to be {state}")
        return self.job(job_id)

    def start(self, job_id: int, nodes: tuple[str, ...], gpus: int) -> SlurmJob:
        """Start a waiting job on exactly these nodes, with so many GPUs on each."""
        self.client.configure(job_id, Geometry(nodes, gpus, gpus), start=True)
        return self.wait(job_id, JobState.RUNNING)

    def requeue(self, job_id: int) -> None:
        self.client.requeue(job_id)
        self.wait(job_id, JobState.PENDING)
        time.sleep(1.1)  # a start in the second of the requeue fails

    def output(self, job_id: int) -> str:
        path = self.folder / f"out.{job_id}"
        return path.read_text() if path.exists() else ""

    def until_output(self, job_id: int, has: Callable[[str], object]) -> str:
        """Wait until what a job has printed is as it should be; return it."""
        deadline = time.monotonic() + PATIENCE_S
        while not has(text := self.output(job_id)):
            assert time.monotonic() < deadline, f"not in {PATIENCE_S:.0f} s; output so far:\n{text}"
            time.sleep(0.1)
        return text

    def end(self) -> None:
        if self.ids:
            self.cluster.command("scancel", *map(str, self.ids))
        found = self.client.jobs
        wait_until(lambda: all(j.state.finished for j in found(self.ids).values()), PATIENCE_S, "their end")
