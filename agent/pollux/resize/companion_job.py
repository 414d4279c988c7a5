"""Grow a job in place by a companion job, which lends nodes and ranks.

Slurm cannot add nodes to a running job. So rank 0 submits a companion job, as the user. It runs further ranks of the
same script, and the scheduler places it. These ranks read the address of rank 0, and a secret, from a file that only
the user can read: no command line and no environment variable holds the secret. The training goes on until all further
ranks are ready.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pollux.errors import PolluxAgentError
from pollux.private_folder import PrivateFolder, remove
from pollux.ranks.rendezvous import Rendezvous, until
from pollux.resize.joining import STOP
from pollux.resize.parent_options import parent_options
from pollux.search.tasks import TRIAL_VARIABLES
from pollux.slurm_job import slurm_commands
from pollux.slurm_job.allocation import show_job
from pollux.slurm_job.environment import BATCH_PYTHON, CHOSEN_INTERFACE, CONTAINER

logger = logging.getLogger("pollux")

ROLL_CALL_WAIT = 5.0
"""Seconds in which every joiner has to answer before the job's ranks leave their groups."""

_LOOK = 0.05  # seconds between two looks for joiners
_SBATCH_WAIT = 60.0
_LOOKS = 12
"""So often Slurm is asked, within the joiners' time, whether it still boots their nodes."""

_KEPT = (
    CONTAINER,
    "POLLUX_CHECKPOINT_DIR",
    "POLLUX_CHECKPOINT_INTERVAL",
    "POLLUX_MODE",
    "POLLUX_PRIOR",
    *TRIAL_VARIABLES,
)
_DROPPED = re.compile(
    r"(TORCHELASTIC|POLLUX|ROLE)_.*"
    r"|(LOCAL_|GROUP_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)"
    r"|(CUDA|HIP|ROCR|NVIDIA)_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK"
)
"""Variables that belong to this allocation or this process, and would mislead the companion job."""


class RecruitmentFailed(PolluxAgentError):
    """No further ranks come."""


@dataclass(frozen=True)
class Wanted:
    """The ranks to come in for a move: `nodes` of `per_node` ranks each."""

    move: int
    nodes: int
    per_node: int
    nonce: str
    """Of the move's order."""

    @property
    def ranks(self) -> int:
        return self.nodes * self.per_node


class CompanionJob:
    """One companion job, on rank 0, until its ranks are in."""

    def __init__(
        self,
        wanted: Wanted,
        rendezvous: Rendezvous,
        directory: Path,
        facts: Mapping[str, Any],
        same: Mapping[str, str],
        *,
        wait: float,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """Prepare a companion job, without submitting it.

        `facts`: what joiners have to know about the job before they join. `same`: facts that must be equal on them, by
        name. `wait`: seconds until all joiners have to be ready, once their nodes have booted.
        """
        self.wanted = wanted
        self._rendezvous, self._facts, self._same, self._wait = rendezvous, facts, same, wait
        self._path = directory / f"companion-{wanted.move}.json"
        self._environ = environ
        self._job_id: str | None = None
        self._stopped = threading.Event()

    def bring(self) -> None:
        """Submit the job; wait until its ranks are ready, or are sent away.

        Takes minutes: not on the training thread. Raises PolluxAgentError where the ranks do not come.
        """
        self._write()
        self._job_id = submit(self._path, self.wanted, self._environ)
        logger.info("companion job %s submitted for %d nodes", self._job_id, self.wanted.nodes)
        self._await()
        if self._stopped.is_set():
            self._cancel()  # it may have been sent away before it had a job id

    def send_away(self) -> None:
        """Tell the joiners to end, and cancel the job. Asks Slurm: not on the training thread."""
        self._stopped.set()
        try:
            for awaited in ("go", "call"):
                self._rendezvous.tell(self._key(awaited), STOP)
        except PolluxAgentError as error:
            logger.warning("joiners could not be sent away: %s", error)
        self._cancel()
        self.close()

    def close(self) -> None:
        """Remove the file from which joiners read how to join."""
        with contextlib.suppress(OSError):
            remove(self._path)

    def roll_call(self) -> bool:
        """Whether every joiner answers at this moment; on the training thread."""
        self._rendezvous.tell(self._key("call"), True)
        return until(lambda: self._rendezvous.count(self._key("here")) >= self.wanted.ranks, ROLL_CALL_WAIT)

    def go(self, decision: Mapping[str, Any]) -> None:
        """Tell the joiners to form groups with the job's ranks."""
        self._rendezvous.tell(self._key("go"), dict(decision))

    def _key(self, name: str) -> str:
        return f"recruit/{self.wanted.move}/{name}"

    def _write(self) -> None:
        command = json.loads(self._environ.get("POLLUX_COMMAND", "{}"))
        content = {
            "address": self._rendezvous.address,
            "port": self._rendezvous.port,
            "secret": self._rendezvous.secret,
            "cwd": command.get("cwd", str(Path.cwd())),
            "argv": command.get("argv", sys.argv),
            "move": self.wanted.move,
            **self._facts,
        }
        try:
            with PrivateFolder.make(self._path.parent) as folder:  # there may be no checkpoint yet
                # An earlier start of this job may have recruited for the same move, and ended in it: that file stays.
                folder.create(self._path.name, lambda file: file.write(json.dumps(content).encode()))
        except OSError as error:
            raise RecruitmentFailed(f"the file for the joiners cannot be written: {error}") from error

    def _await(self) -> None:
        begun = looked = time.monotonic()
        missing = set(range(self.wanted.ranks))
        while missing and not self._stopped.is_set():
            for index in sorted(missing):
                here = self._rendezvous.value(self._key(f"ready/{index}"))
                if here is None:
                    break
                for what, mine in self._same.items():
                    if here[what] != mine:
                        raise RecruitmentFailed(
                            f"{what} has changed since this job began: a joiner has {here[what]}, expected {mine}"
                        )
                missing.discard(index)
            trouble = self._rendezvous.value(self._key("failed"))
            if trouble is not None:
                raise RecruitmentFailed(f"a joiner's script has ended before its training: {trouble}")
            now = time.monotonic()
            if missing and now >= looked + self._wait / _LOOKS:
                # A boot uses up nothing of the time that the joiners have for their start.
                looked = now
                begun = now if self._boots() else begun
            if missing and now >= begun + self._wait:
                raise RecruitmentFailed(
                    f"{len(missing)} of {self.wanted.ranks} joiners were not ready after {self._wait:.0f} s"
                )
            self._stopped.wait(_LOOK)

    def _boots(self) -> bool:
        """Whether Slurm still boots a node for the job. polluxd cancels a job that it no longer waits for."""
        return "JobState=CONFIGURING" in (show_job(self._job_id or "") or "")

    def _cancel(self) -> None:
        if self._job_id is None:
            return
        try:
            slurm_commands.run("scancel", self._job_id)
        except (OSError, subprocess.SubprocessError) as error:
            logger.warning("companion job %s could not be cancelled: %s", self._job_id, error)


def submit(path: Path, wanted: Wanted, environ: Mapping[str, str]) -> str:
    """Submit the companion job; return its id. sbatch(1). Raises RecruitmentFailed where Slurm refuses."""
    parent = environ.get("SLURM_JOB_ID", "")
    options = {
        "job-name": f"{environ.get('SLURM_JOB_NAME', 'job')}.companion",
        "nodes": str(wanted.nodes),
        "ntasks-per-node": "1",
        "gres": f"gpu:{wanted.per_node}",
        **parent_options((parent and show_job(parent)) or "", environ),
    }
    command = ["sbatch", "--parsable", "--no-requeue", "--open-mode=append", "--export=ALL"]
    command += [f"--{name}={value}" for name, value in options.items() if value]
    attempt = environ.get("SLURM_RESTART_COUNT") or "0"
    python = environ.get(BATCH_PYTHON) or sys.executable
    run = shlex.join([python, "-m", "pollux.launcher.launch", "run", "--companion", str(path)])
    line = f"companion-of={parent} attempt={attempt} move={wanted.move} nonce={wanted.nonce}"
    script = f"#!/bin/sh\n#POLLUX {line}\nexec {run}\n"
    try:
        answer = slurm_commands.run(*command, timeout=_SBATCH_WAIT, given=script, environ=clean(environ))
    except (OSError, subprocess.SubprocessError) as error:
        raise RecruitmentFailed(f"a companion job cannot be submitted from here: {error}") from error
    if answer.returncode:
        raise RecruitmentFailed(f"sbatch refused the companion job: {' '.join(answer.stderr.split())[:200]}")
    return answer.stdout.strip().split(";")[0]


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without this allocation's variables and secrets.

    The network interfaces that the user names for gloo and NCCL stay. The launcher's own choice is for this node alone.
    """
    own = slurm_commands.for_commands(environ)
    found = {name: value for name, value in own.items() if name in _KEPT or not _DROPPED.fullmatch(name)}
    if CHOSEN_INTERFACE in environ:
        found.pop("GLOO_SOCKET_IFNAME", None)
    return found
