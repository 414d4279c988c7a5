"""A private cluster with three ordinary users, and their commands."""

from __future__ import annotations

import os
import pwd
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from contrib.devcluster import DevCluster
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.scontrol import ScontrolClient

USERS = ("pollux-alice", "pollux-mallory", "pollux-third")
"""Alice is honest, mallory is not, and the third user has no jobs."""

_WITHOUT_TEXT_GUARD = "pollux_hostile = function(_) return nil end\nPOLLUX_SCRIPT_BYTES = 1e9\n"


class Site:
    """The cluster, its users and what each of them may do.

    Args:
        folder: of scripts; every user may read it.
    """

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.slurm = ScontrolClient(conf=cluster.slurm_conf)
        self._submitted: list[int] = []

    def run(self, user: str, *argv: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run a command as one of the users ("alice", "mallory", "third")."""
        entry = pwd.getpwnam(f"pollux-{user}")
        return subprocess.run(
            argv,
            env={**self.cluster.client_environment, "HOME": "/", "USER": entry.pw_name},
            cwd="/",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
        )

    def script(self, name: str, *lines: str) -> Path:
        """Write a batch script that runs `lines` and then sleeps."""
        path = self.folder / name
        path.write_text("\n".join(("#!/bin/sh", *lines, "sleep 600")) + "\n")
        path.chmod(0o755)
        return path

    def sbatch(self, user: str, script: Path, *options: str) -> tuple[int | None, str]:
        """Submit a script; return the job's id, or None and sbatch's complaint."""
        done = self.run(user, "sbatch", "--parsable", "--output=/dev/null", *options, str(script))
        if done.returncode:
            return None, " ".join(done.stderr.split())
        self._submitted.append(int(done.stdout))
        return int(done.stdout), ""

    def job(self, job_id: int) -> SlurmJob | None:
        """Return the job as polluxd reads it."""
        return self.slurm.jobs([job_id]).get(job_id)

    def until(self, ready: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:g} s in vain for {what}")
            time.sleep(0.1)

    def clear(self) -> None:
        """End all jobs of the attempt."""
        if self._submitted:
            self.cluster.command("scancel", *map(str, self._submitted))
            self.until(
                lambda: all(j.state.finished for j in self.slurm.jobs(self._submitted).values()), "scancel"
            )
        self._submitted.clear()

    @contextmanager
    def without_text_guard(self) -> Iterator[None]:
        """Switch off what the submission hook does about hostile text."""
        hook = self.cluster.slurm_conf.with_name("job_submit.lua")
        before = hook.read_text()
        self._rewrite(hook, before + _WITHOUT_TEXT_GUARD)
        try:
            yield
        finally:
            self._rewrite(hook, before)

    @staticmethod
    def _rewrite(hook: Path, text: str) -> None:
        # slurmctld reads the script again only if its modification time, in whole seconds, is newer.
        newer = hook.stat().st_mtime + 2
        hook.write_text(text)
        os.utime(hook, (newer, newer))


@contextmanager
def users() -> Iterator[None]:
    """Create the three users; remove those that did not exist before."""
    made = []
    try:
        for name in USERS:
            try:
                pwd.getpwnam(name)
            except KeyError:
                subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True)
                made.append(name)
        yield
    finally:
        for name in made:
            subprocess.run(["userdel", name], check=False, capture_output=True)


@contextmanager
def site() -> Iterator[Site]:
    """Start a new cluster and remove it afterwards."""
    with tempfile.TemporaryDirectory(prefix="pollux-attack-") as name, users():
        folder = Path(name)
        folder.chmod(0o755)
        scripts = folder / "scripts"
        scripts.mkdir()
        with DevCluster(folder / "cluster", lease_s=60) as cluster:
            yield Site(cluster, scripts)
