"""Slurm through its own commands, `scontrol` and `scancel`: works with every version, from an unprivileged account
with Operator rights (or as SlurmUser or root where there is no slurmdbd)."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from polluxd.errors import SlurmError, SlurmGarbled, SlurmRefused, SlurmUnavailable
from polluxd.model import JobState, Node
from polluxd.slurm.protocol import ClusterState, Geometry, SlurmJob
from polluxd.slurm.records import parse_jobs, parse_nodes
from polluxd.slurm.topology import parse_topology

log = logging.getLogger(__name__)

TOPOLOGY_S = 300.0
"""Racks change with slurm.conf: they are asked for no more often than this."""

# What the client commands print when slurmctld did not answer, as opposed to when it said no. Some come from
# Slurm's communication layer, some from munge.
_NO_ANSWER = re.compile(
    r"unable to contact slurm controller|connection refused|connect failure|socket timed out|communication|"
    r"zero bytes were transmitted|transport endpoint|timed out|in standby mode|authentication error|munge|"
    r"unable to establish a configuration source|could not establish a configuration source|temporarily|"
    r"slurmctld is shutting down|resource temporarily unavailable|connection reset|"
    r"slurm_(msg_sendto|receive_msg|send_recv)|missing socket",
    re.IGNORECASE,
)
_UNKNOWN_JOB = re.compile(r"invalid job id", re.IGNORECASE)


class ScontrolClient:
    """A SlurmClient over command lines.

    Args:
        conf: slurm.conf of the cluster; None: the machine's own (or configless).
        timeout: seconds after which a command is given up. Keep it below the leader's lease.
        clock: POSIX time, for `ClusterState.taken_at`.
    """

    def __init__(
        self, *, conf: Path | str | None = None, timeout: float = 10.0, clock: Callable[[], float] = time.time
    ) -> None:
        self._timeout = timeout
        self._clock = clock
        self._ours: set[int] = set()
        self._rack: Mapping[str, str] = {}
        self._racks_at: float | None = None
        # Nothing of another cluster or job may leak in, and times are to be UTC both ways, whatever the machine's
        # zone and its daylight saving.
        dropped = ("SLURM_", "SBATCH_", "SCANCEL_", "SQUEUE_", "SINFO_")
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(dropped)}
        self._env |= {"TZ": "UTC0", "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
        if conf is not None or "SLURM_CONF" in os.environ:
            self._env["SLURM_CONF"] = str(conf if conf is not None else os.environ["SLURM_CONF"])

    def observe(self) -> ClusterState:
        taken_at = self._clock()
        jobs, nodes = self._read_all()
        self._learn_all(jobs)
        if not nodes:
            raise SlurmGarbled("Slurm shows no node at all")
        rack = self._racks(taken_at)
        if rack:
            nodes = tuple(replace(node, rack=rack.get(node.name, "")) for node in nodes)
        return ClusterState(taken_at, nodes, jobs)

    def _racks(self, now: float) -> Mapping[str, str]:
        """The leaf switch of each node, as last heard: placement can do without, so no error ends an observation."""
        if self._racks_at is None or not 0 <= now - self._racks_at < TOPOLOGY_S:
            self._racks_at = now
            try:
                self._rack = parse_topology(self._run("scontrol", "show", "topology"))
            except SlurmError as error:
                log.warning("racks are as they were known before (%d nodes): %s", len(self._rack), error)
        return self._rack

    def jobs(self, job_ids: Sequence[int]) -> dict[int, SlurmJob]:
        # scontrol takes a single job id or all jobs; one call is what matters.
        if not job_ids:
            return {}
        if len(job_ids) > 1:
            wanted = set(job_ids)
            return {job.job_id: job for job in self._all_jobs() if job.job_id in wanted}
        return {
            job.job_id: job for job in self._learn(self._read_job(job_ids[0])) if job.job_id == job_ids[0]
        }

    def signal(self, job_id: int, name: str = "USR1") -> None:
        self._must_be_ours([job_id])
        # Without --batch and --full: every step, and not the batch script, which would die of it.
        self._run("scancel", f"--signal={name}", str(job_id))

    def requeue(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        # Plain `requeue` runs a job again that has ended a moment ago; `incomplete` passes over it.
        self._run("scontrol", "requeue", "incomplete", str(job_id))

    def run_again(self, job_id: int) -> None:
        self._must_be_ours([job_id])
        self._run("scontrol", "requeue", str(job_id))

    def configure(
        self, job_id: int, geometry: Geometry, *, start: bool, time_limit_s: float | None = None
    ) -> None:
        self._must_be_ours([job_id])
        k, cpus = len(geometry.nodes), geometry.cpus_per_task
        words = [
            f"JobId={job_id}",
            f"NumNodes={k}-{k}",  # "2" alone is refused on a one-node job: its maximum stays 1
            f"NumTasks={k}",
            f"NumCPUs={k * cpus}",  # left out when shrinking: BadConstraints
            f"CPUsPerTask={cpus}",
            f"MinCPUsNode={cpus}",  # stays as at submission otherwise, and a smaller size would never fit
            "TasksPerNode=1",
            # Left set, any other way of asking for GPUs adds to the one that follows.
            "TresPerJob=",
            "TresPerTask=",
            f"TresPerNode=gres:gpu:{geometry.gpus_per_node}",
            f"ReqNodeList={','.join(geometry.nodes)}",
        ]
        if geometry.mem_per_node_mb is not None:
            words.append(f"MinMemoryNode={geometry.mem_per_node_mb}")
        if time_limit_s is not None:
            words.append(_time_limit(time_limit_s))
        if start:
            # Wakes the scheduler at once. Left out, the job waits for cred_expire + 1 s after its requeue.
            words.append("StartTime=now")
        self._run("scontrol", "update", *words)

    def limit_time(self, job_id: int, seconds: float) -> None:
        self._must_be_ours([job_id])
        self._run("scontrol", "update", f"JobId={job_id}", _time_limit(seconds))

    def renew(self, job_ids: Sequence[int], until: float) -> None:
        if not job_ids:
            return
        self._must_be_ours(job_ids)
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(until))
        ids = ",".join(str(job_id) for job_id in job_ids)
        try:
            self._run("scontrol", "update", f"JobId={ids}", f"StartTime={when}")
        except SlurmRefused:
            # Slurm goes on to the other jobs after one that started or ended in the meantime; that is no trouble.
            now = [job for job in self._all_jobs() if job.job_id in job_ids and job.state is JobState.PENDING]
            if any((job.eligible_time or 0.0) < until - 1 for job in now):
                raise

    def _all_jobs(self) -> tuple[SlurmJob, ...]:
        return self._learn_all(self._read_jobs())

    def _read_all(self) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...]]:
        jobs = self._read_jobs()
        return jobs, parse_nodes(self._run("scontrol", "-a", "-o", "-d", "show", "node"), jobs)

    def _read_jobs(self) -> tuple[SlurmJob, ...]:
        return parse_jobs(self._run("scontrol", "-a", "-o", "-d", "show", "job"))

    def _read_job(self, job_id: int) -> tuple[SlurmJob, ...]:
        """None where Slurm has forgotten it."""
        try:
            return parse_jobs(self._run("scontrol", "-a", "-o", "-d", "show", "job", str(job_id)))
        except SlurmRefused as error:
            if _UNKNOWN_JOB.search(str(error)):
                return ()
            raise

    def _learn_all(self, jobs: tuple[SlurmJob, ...]) -> tuple[SlurmJob, ...]:
        self._ours.clear()  # those that Slurm has forgotten too: a service runs for months
        return self._learn(jobs)

    def _learn(self, jobs: tuple[SlurmJob, ...]) -> tuple[SlurmJob, ...]:
        for job in jobs:
            if job.spec is not None:
                self._ours.add(job.job_id)
            else:
                self._ours.discard(job.job_id)
        return jobs

    def _must_be_ours(self, job_ids: Sequence[int]) -> None:
        """Raises SlurmRefused for a job that does not carry Pollux' AdminComment."""
        if not self._ours.issuperset(job_ids):
            self._all_jobs()
        foreign = sorted(set(job_ids) - self._ours)
        if foreign:
            raise SlurmRefused(f"jobs {foreign} did not opt in (or are gone): polluxd does not touch them")

    def _run(self, *argv: str) -> str:
        try:
            done = subprocess.run(
                argv,
                env=self._env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout,
                check=False,
                # Undecodable bytes (a job's name in another encoding) must not stop the reading.
                encoding="utf-8",
                errors="replace",
            )
        except subprocess.TimeoutExpired as error:
            raise SlurmUnavailable(
                f"{_short(argv)}: no answer within {self._timeout:g} s; it may have been applied all the same"
            ) from error
        except OSError as error:
            raise SlurmUnavailable(
                f"{argv[0]} cannot be run ({error.strerror}): is Slurm's client installed?"
            ) from error
        if done.returncode == 0:
            return done.stdout
        raise _failure(argv, done.returncode, (done.stderr or done.stdout).strip())


def _time_limit(seconds: float) -> str:
    return f"TimeLimit={max(1, ceil(seconds / 60.0))}"


def _failure(argv: Sequence[str], status: int, complaint: str) -> SlurmError:
    if status < 0 or _NO_ANSWER.search(complaint):
        return SlurmUnavailable(
            f"{_short(argv)}: slurmctld does not answer: {complaint or f'signal {-status}'}"
        )
    return SlurmRefused(f"{_short(argv)}: {complaint or f'exit status {status}'}")


def _short(argv: Sequence[str]) -> str:
    text = " ".join(argv)
    return text if len(text) <= 160 else text[:157] + "..."
