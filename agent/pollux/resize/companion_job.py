"""Growing a job in place: a companion job lends it further nodes, and this finds the ranks that come of it.

Slurm lets no running job grow. So rank 0 submits, as the user, a job that does nothing but run further ranks of the
same script, and the scheduler places it. Their way to rank 0 is told in a file that only the user can read: no secret
is on a command line or in an environment. The training goes on until all of them are ready.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.ranks.rendezvous import Rendezvous, until
from pollux.slurm_job.allocation import fewest_cpus, show_job
from pollux.slurm_job.environment import number

logger = logging.getLogger("pollux")

RECRUIT_WAIT = 120.0
"""Seconds from the companion's submission until all its ranks have to be ready."""

ROLL_CALL_WAIT = 5.0
"""Seconds in which every joiner has to answer before the others leave what works."""

_LOOK = 0.05  # seconds between two looks for joiners
_SBATCH_WAIT = 60.0

_KEPT = ("SLURM_CONF", "POLLUX_CHECKPOINT_DIR", "POLLUX_CHECKPOINT_INTERVAL", "POLLUX_MODE", "POLLUX_PRIOR")
_DROPPED = re.compile(
    r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|PMI|PMIX|TORCHELASTIC|POLLUX|ROLE)_.*"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|GLOO_SOCKET_IFNAME"
    r"|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""What belongs to this allocation or to this process, and would mislead another job's."""


class RecruitmentFailed(PolluxAgentError):
    """No further ranks came."""


@dataclass(frozen=True)
class Wanted:
    """What is to come in: `nodes` further nodes of `per_node` ranks each, for a move."""

    move: int
    nodes: int
    per_node: int

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


class Recruit:
    """One companion job, from its submission until its ranks are in, on rank 0."""

    def __init__(
        self,
        wanted: Wanted,
        meeting: Rendezvous,
        directory: Path,
        facts: Mapping[str, Any],
        same: Mapping[str, str],
        *,
        on_ready: Callable[[], None],
        on_failure: Callable[[str], None],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`facts`: what joiners have to know of the job before they meet it; `same`: what theirs must equal, by name.

        The callbacks come from a thread.
        """
        self.wanted = wanted
        self._meeting, self._facts, self._same = meeting, facts, same
        self._path = directory / f"companion-{wanted.move}.json"
        self._on_ready, self._on_failure = on_ready, on_failure
        self._environ = environ
        self._job_id: str | None = None
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pollux-recruit", daemon=True).start()

    def stop(self) -> None:
        """Send those who came away again, and end the companion."""
        self._stopped.set()
        self._meeting.tell(self._key("stop"), True)
        self._cancel()
        self.close()

    def close(self) -> None:
        """They are in, or will not come: the way is closed."""
        self._path.unlink(missing_ok=True)

    def roll_call(self) -> bool:
        """Whether every joiner answers at this moment; on the training thread."""
        self._meeting.tell(self._key("call"), True)
        return until(lambda: self._meeting.count(self._key("here")) >= self.wanted.ranks, ROLL_CALL_WAIT)

    def go(self, order: Mapping[str, Any]) -> None:
        """Tell the joiners to form groups with the others."""
        self._meeting.tell(self._key("go"), dict(order))

    def _key(self, name: str) -> str:
        return f"recruit/{self.wanted.move}/{name}"

    def _run(self) -> None:
        try:
            self._write()
            self._job_id = submit(self._path, self.wanted, self._environ)
            logger.info("companion job %s submitted for %d nodes", self._job_id, self.wanted.nodes)
            self._await()
        except Exception as error:  # whatever it is: the training goes on, and the scheduler is to know
            if self._stopped.is_set():
                return
            self.fail(str(error))
            return
        if not self._stopped.is_set():
            self._on_ready()

    def fail(self, why: str) -> None:
        """Give up, and say so."""
        self._on_failure(why)
        try:
            self.stop()
        except PolluxAgentError as error:
            logger.warning("joiners could not be sent away: %s", error)

    def _write(self) -> None:
        command = json.loads(self._environ.get("POLLUX_COMMAND", "{}"))
        told = {
            "address": self._meeting.address,
            "port": self._meeting.port,
            "secret": self._meeting.secret,
            "cwd": command.get("cwd", str(Path.cwd())),
            "argv": command.get("argv", sys.argv),
            "move": self.wanted.move,
            **self._facts,
        }
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # there may be no checkpoint yet
            # Not where one lies: another life of this job has recruited for the same move, and ended in it.
            line = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(line, "w") as file:
                json.dump(told, file)
        except OSError as error:
            raise RecruitmentFailed(f"the joiners cannot be told the way: {error}") from error

    def _await(self) -> None:
        wait = number(self._environ, "POLLUX_RECRUIT_WAIT", RECRUIT_WAIT)
        end = time.monotonic() + wait
        missing = set(range(self.wanted.ranks))
        while missing and not self._stopped.is_set():
            for index in sorted(missing):
                here = self._meeting.heard(self._key(f"ready/{index}"))
                if here is None:
                    break
                for what, mine in self._same.items():
                    if here[what] != mine:
                        raise RecruitmentFailed(
                            f"{what} is not what it was when this job began: a joiner has {here[what]}, and not {mine}"
                        )
                missing.discard(index)
            trouble = self._meeting.heard(self._key("failed"))
            if trouble is not None:
                raise RecruitmentFailed(f"a joiner's script has ended before its training: {trouble}")
            if missing and time.monotonic() >= end:
                raise RecruitmentFailed(
                    f"{len(missing)} of {self.wanted.ranks} joiners were not ready after {wait:.0f} s"
                )
            self._stopped.wait(_LOOK)

    def _cancel(self) -> None:
        if self._job_id is None:
            return
        try:
            subprocess.run(
                ["scancel", self._job_id],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=20,
                check=False,
            )
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("companion job %s could not be cancelled: %s", self._job_id, error)


def submit(path: Path, wanted: Wanted, environ: Mapping[str, str]) -> str:
    """Submit the companion job; returns its id. sbatch(1). Raises RecruitmentFailed where that is refused."""
    parent = environ.get("SLURM_JOB_ID", "")
    options = {
        "job-name": f"{environ.get('SLURM_JOB_NAME', 'job')}.companion",
        "nodes": str(wanted.nodes),
        "ntasks-per-node": "1",
        "gres": f"gpu:{wanted.per_node}",
        "cpus-per-task": str(fewest_cpus(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) or ""),
        "partition": environ.get("SLURM_JOB_PARTITION", ""),
        "account": environ.get("SLURM_JOB_ACCOUNT", ""),
        "qos": environ.get("SLURM_JOB_QOS", ""),
        "output": _output_of(parent),
    }
    command = ["sbatch", "--parsable", "--no-requeue", "--open-mode=append"]
    command += [f"--{name}={value}" for name, value in options.items() if value]
    attempt = environ.get("SLURM_RESTART_COUNT") or "0"
    run = shlex.join([sys.executable, "-m", "pollux.launcher.launch", "run", "--companion", str(path)])
    script = f"#!/bin/sh\n#POLLUX companion-of={parent} attempt={attempt} move={wanted.move}\nexec {run}\n"
    try:
        answer = subprocess.run(
            command,
            input=script,
            env=clean(environ),
            capture_output=True,
            text=True,
            timeout=_SBATCH_WAIT,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise RecruitmentFailed(f"a companion job cannot be submitted from here: {error}") from error
    if answer.returncode:
        raise RecruitmentFailed(f"sbatch refused the companion job: {' '.join(answer.stderr.split())[:200]}")
    return answer.stdout.strip().split(";")[0]


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what is of this allocation, of this process, or secret."""
    return {name: value for name, value in environ.items() if name in _KEPT or not _DROPPED.fullmatch(name)}


def _output_of(job_id: str) -> str:
    """Where a job's output goes; empty where that is not to be found out: sbatch's own choice then."""
    if not job_id:
        return ""
    shown = show_job(job_id)
    if shown is None:
        return ""
    found = re.search(r"(?:^| )StdOut=(/.*?)(?: \w+=|$)", shown)
    # A percent sign is sbatch's own.
    return found.group(1).replace("%", "%%") if found else ""
