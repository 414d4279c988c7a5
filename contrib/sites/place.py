"""The site: a private cluster, an unprivileged polluxd, an ordinary user."""

from __future__ import annotations

import os
import pwd
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from contrib.devcluster import DevCluster, DevClusterError, Polluxd, SiteLines
from contrib.devcluster.power_saving import PowerSaving
from contrib.devcluster.processes import program
from contrib.sites.idle import Sampler, Wish
from polluxd.errors import SlurmError
from polluxd.model import JobState, Move
from polluxd.site.files import apply, differences
from polluxd.site.hooks import Role, unwanted
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.scontrol import ScontrolClient
from polluxd.store import Store

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
USER = "nobody"
WATCH_S = 6.0
"""How long a state must last: longer than a decision and a move's first steps."""
_ALIVE = {"PENDING", "RUNNING", "COMPLETING", "SUSPENDED", "CONFIGURING", "REQUEUED"}

_SITE = SiteLines(
    lines=(
        # The site that the installation page advises.
        "SelectTypeParameters=CR_Core_Memory",
        "DefMemPerGPU=500",
        "AccountingStorageEnforce=associations,limits,qos",
        "Licenses=matlab:1",
        "PreemptType=preempt/qos",
        "PreemptMode=REQUEUE",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=100000",
        # Else `scontrol reconfigure`, the disturbance, sets a partition to UP that the case has set to DOWN.
        "ReconfigFlags=KeepPartState",
    ),
    gpu_types={"n3": "2080ti", "n4": "1g.5gb"},
    nodes={"n1": "Feature=ib,old", "n2": "Feature=ib,new"},
    partitions={"debug": "Nodes=n4"},
)
_ACCOUNTS = (
    ("add", "account", "lab", "GrpTRES=gres/gpu=6"),
    ("add", "account", "open"),
    ("add", "qos", "urgent", "Priority=1000", "Preempt=normal"),
    ("add", "qos", "high", "Priority=500"),
    ("add", "qos", "scavenge"),
    ("modify", "qos", "where", "name=normal", "set", "Preempt=scavenge"),
    ("add", "user", USER, "account=lab"),
    ("add", "user", USER, "account=open"),
    (
        "modify",
        "user",
        "where",
        f"name={USER}",
        "set",
        "qos=normal,urgent,high,scavenge",
        "DefaultAccount=open",
    ),
)


class Place:
    """The cluster, its polluxd and the user's commands."""

    def __init__(self, cluster: DevCluster, folder: Path, lease_s: int = 60) -> None:
        self.cluster = cluster
        self.folder = folder
        self.control: Place | None = None
        """A site without polluxd, to which the same is done at the same time."""
        self._there: dict[int, int] = {}
        """Ids of jobs at the control, by the id here."""
        self.slurm = ScontrolClient(conf=cluster.slurm_conf)
        self.store = Store(cluster.database_url, cluster.cluster_name)
        self.submitted: list[int] = []
        self.jobs_of_case: set[int] = set()
        """Jobs whose moves count for the case."""
        self.idle = Sampler(cluster.client_environment)
        self.daemon = Polluxd(cluster, folder, slurm={"lease_s": lease_s})
        self.polluxd = self.daemon.command

    def start(self) -> None:
        """Start polluxd as the cluster's unprivileged `daemon_user`, and wait for its first cycle."""
        self.daemon.start()
        self.until(self.cluster.hooks.heartbeat_file.exists, "polluxd's first cycle")

    def remove(self) -> None:
        """Take polluxd and its hooks away, as the installation page says."""
        self.daemon.stop()
        states, _ = unwanted(self.cluster.hooks.site(), (Role.CONTROLLER, Role.NODE, Role.LOGIN))
        apply(differences([state for state in states if state.path.suffix == ".lua"]))
        # slurmctld looks at whole seconds.
        script = self.cluster.slurm_conf.with_name("job_submit.lua")
        at = script.stat().st_mtime + 2
        os.utime(script, (at, at))

    def install(self) -> None:
        """Bring the hooks and polluxd back."""
        self.cluster.hooks.write()
        self.daemon.start()

    def stop(self) -> None:
        self.idle.stop()
        self.daemon.stop()
        self.store.close()

    def command(self, *argv: str) -> str:
        """Run a command of Slurm; return its output."""
        if self.control is not None:
            words = [re.sub(r"(?<=^JobId=)\d+$|^\d+$", self._id_there, word) for word in argv]
            with suppress(DevClusterError):  # there, the job may have ended
                self.control.command(*words)
        return self.cluster.command(*argv)

    def _id_there(self, found: re.Match[str]) -> str:
        return str(self._there.get(int(found[0]), found[0]))

    def restart_slurmctld(self) -> None:
        for place in filter(None, (self.control, self)):
            place.cluster.restart_slurmctld()

    def admit(self, job_id: int) -> None:
        """The site allows a barred job's start from now on."""
        self.idle.admit(job_id)
        if self.control is not None and job_id in self._there:
            self.control.idle.admit(self._there[job_id])

    # --- the user's hands ---------------------------------------------------------------------------------

    def sbatch(
        self, name: str, body: str, *lines: str, gpus: int = 1, head: str = "", wish: Wish | None = None
    ) -> int:
        """Submit a script.

        Args:
            lines: of #SBATCH and #POLLUX, without their hash signs.
            head: of #SBATCH, asks for the nodes and GPUs, if not for `gpus` GPUs on one node.
            wish: the placements that the job can use, if not `gpus` GPUs on any one node.

        Raises:
            RuntimeError: sbatch refused it.
        """
        script = self.folder / f"{name}.sbatch"
        asked = head or f"SBATCH --nodes=1 --gpus-per-node={gpus} --ntasks-per-node=1"
        head_lines = [f"SBATCH --job-name={name} --output={self.folder}/{name}.log", asked]
        run = [
            f"export PATH={BIN}:$PATH POLLUX_CHECKPOINT_DIR={self.folder}/checkpoints-{name}",
            f"cd {ROOT}",
        ]
        script.write_text(
            "\n".join(["#!/bin/bash", *(f"#{line}" for line in (*head_lines, *lines)), *run, body]) + "\n"
        )
        who = pwd.getpwnam(USER)
        done = subprocess.run(
            ["sbatch", "--parsable", str(script)],
            env=self.cluster.client_environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
        )
        if done.returncode:
            raise RuntimeError(f"sbatch {name}: {done.stderr.strip()}")
        job_id = int(done.stdout)
        self.submitted.append(job_id)
        self.jobs_of_case.add(job_id)
        self.idle.wish(job_id, wish or Wish(gpus))
        if self.control is not None:
            self._there[job_id] = self.control.sbatch(name, body, *lines, gpus=gpus, head=head, wish=wish)
        return job_id

    def train(self, name: str, *lines: str, wish: Wish | None = None) -> int:
        """Submit a training without an end, and await its first step."""
        body = "pollux run contrib/examples/digits_mlp.py --epochs 100000 --alpha 0.05 --beta 0.0005 --sync 0.01 0.02"
        job_id = self.sbatch(name, body, *lines, wish=wish)
        self.until(lambda: self.trains(job_id), f"the first step of {name}", 150)
        return job_id

    def trains(self, job_id: int) -> bool:
        """Whether the present attempt has made a step."""
        job, report = self.job(job_id), self.store.reports().get(job_id)
        return (
            report is not None
            and job.state is JobState.RUNNING
            and report.attempt == job.restart_count
            and report.first_step_at is not None
        )

    def progress(self, job_id: int) -> float:
        """Steps of the training, by its newest report."""
        return self.store.reports()[job_id].progress

    def job(self, job_id: int) -> SlurmJob:
        return self.slurm.jobs([job_id])[job_id]

    def runs(self, job_id: int) -> bool:
        return self.job(job_id).state is JobState.RUNNING

    def states(self) -> dict[int, set[str]]:
        """Return the states of all jobs; of an array's tasks, by the array."""
        found: dict[int, set[str]] = {}
        for job in self.slurm.observe().jobs:
            if job.companion is None:
                found.setdefault(job.array[0] if job.array else job.job_id, set()).add(job.raw_state)
        return found

    def ended(self, job_ids: Iterable[int]) -> bool:
        """Whether Slurm answers, and has ended all these jobs."""
        try:
            states = self.states()
        except SlurmError:
            return False
        return not any(states.get(job_id, set()) & _ALIVE for job_id in job_ids)

    def explain(self, job_id: int) -> str:
        return self.daemon.explain(job_id)

    def explained(self, job_id: int, words: str) -> str:
        return self.daemon.explained(self.store, job_id, words)

    def moves(self, job_id: int) -> list[Move]:
        return self.store.moves(job_id)

    def until(self, ready: Callable[[], object], what: str, seconds: float = 120.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if ready():
                    return
            except SlurmError:
                pass  # slurmctld restarts
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {seconds:.0f} s in vain for {what}")
            time.sleep(0.5)

    def stays(self, holds: Callable[[], object], what: str, seconds: float) -> None:
        """Check that `holds` stays true for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                if not holds():
                    raise AssertionError(f"it did not last: {what}")
            except SlurmError:
                pass
            time.sleep(0.5)

    @contextmanager
    def preempting(self, kind: str) -> Iterator[None]:
        """Have slurmctld preempt in another way; only its restart changes that."""
        confs = [place.cluster.slurm_conf for place in filter(None, (self.control, self))]
        old = [conf.read_text() for conf in confs]
        try:
            for conf, text in zip(confs, old, strict=True):
                conf.write_text(re.sub(r"(?m)^PreemptType=.*$", f"PreemptType={kind}", text))
            self.restart_slurmctld()
            yield
        finally:
            for conf, text in zip(confs, old, strict=True):
                conf.write_text(text)
            self.restart_slurmctld()

    def clear(self) -> None:
        """End all jobs of the case."""
        if self.control is not None:
            self.control.clear()
        if self.submitted:
            self.cluster.command("scancel", *map(str, self.submitted))
            self.until(
                lambda: all(
                    job.state.finished
                    for job in self.slurm.observe().jobs
                    if job.job_id in self.submitted or (job.array and job.array[0] in self.submitted)
                ),
                "scancel",
            )
        self.submitted.clear()


@contextmanager
def place(
    site: SiteLines = _SITE,
    accounts: Sequence[Sequence[str]] = _ACCOUNTS,
    *,
    nodes: int = 4,
    gpus_per_node: int = 4,
    lease_s: int = 60,
) -> Iterator[Place]:
    """Bring a site up, without polluxd, and take it down.

    Args:
        accounts: commands of sacctmgr.
    """
    base = Path(tempfile.mkdtemp(prefix="pollux-sites-", dir="/tmp"))
    base.chmod(0o755)
    folder = base / "jobs"
    folder.mkdir()
    folder.chmod(0o1777)
    if site.cloud:
        always_on = ",".join(n for n in (f"n{i + 1}" for i in range(nodes)) if n not in site.cloud)
        power = PowerSaving(base / "power", boot_s=5.0, fails_every=0, always_on=always_on, idle_s=10)
        power.programs(base / "cluster" / "etc" / "slurm.conf", program("slurmd"))
        site = replace(site, lines=(*site.lines, *power.lines))
    with DevCluster(
        base / "cluster",
        nodes=nodes,
        gpus_per_node=gpus_per_node,
        lease_s=lease_s,
        heartbeat_stale_s=30.0,
        publish_interval_s=1.0,
        accounting=True,
        daemon_user="pollux",
        site=site,
    ) as cluster:
        for words in accounts:
            cluster.command("sacctmgr", "-i", *words)
        made = Place(cluster, folder, lease_s)
        try:
            yield made
        finally:
            made.stop()
