"""Slurm through pyslurm where that can be used, else through scontrol.

pyslurm can be used where it is installed and its version is the cluster's.

With pyslurm, a poll needs two commands fewer, since pyslurm reads nodes and jobs. All changes to jobs go through
scontrol: pyslurm's update leaves out the number of nodes, its requeue would run a job again that has just ended.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeVar

from polluxd.errors import SlurmError, SlurmGarbled, SlurmUnavailable
from polluxd.model import Node
from polluxd.slurm.protocol import SlurmClient, SlurmJob
from polluxd.slurm.pyslurm_process import PyslurmProcess, RequestRefused, WorkerFailed, WorkerHung
from polluxd.slurm.pyslurm_records import read_cluster, read_jobs
from polluxd.slurm.scontrol import ScontrolClient, failure

log = logging.getLogger(__name__)

Choice = Literal["auto", "scontrol", "pyslurm"]

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses of pyslurm after a failure: scontrol serves alone, at first for 5 s, then twice as long each time."""

LIFETIME_S = 3600.0
"""A worker is replaced after this time, because it knows slurm.conf as it was when the worker started."""

_T = TypeVar("_T")


def open_client(choice: Choice, *, conf: Path | None, timeout: float) -> SlurmClient:
    """Open the client that the configuration's `slurm.client` asks for.

    The log says which client it is, and why.
    """
    if choice == "scontrol":
        log.info("Slurm is read through scontrol: slurm.client says so")
        return ScontrolClient(conf=conf, timeout=timeout)
    if find_spec("pyslurm") is None:
        _log_fallback(choice, "pyslurm is not installed")
        return ScontrolClient(conf=conf, timeout=timeout)
    return PyslurmClient(conf=conf, timeout=timeout, choice=choice)


class PyslurmClient(ScontrolClient):
    """A SlurmClient that asks a worker process with pyslurm first.

    A call takes at most `timeout`, as with scontrol. The call that starts a worker takes longer. When a worker leaves
    a call unanswered, or slurmctld does not answer, the client raises SlurmUnavailable. When Slurm refuses a reading,
    or the worker answers it with garbage or dies of it, the client reads again through scontrol at once.
    """

    def __init__(
        self,
        *,
        conf: Path | str | None = None,
        timeout: float = 10.0,
        clock: Callable[[], float] = time.time,
        choice: Choice = "auto",
    ) -> None:
        super().__init__(conf=conf, timeout=timeout, clock=clock)
        self._choice = choice
        self.worker: PyslurmProcess | None = None
        self._pause = FIRST_PAUSE_S
        self.paused_until = float("-inf")
        self._logged = ""

    def _read_all(self) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...], Mapping[str, str]]:
        # If the worker cannot read a record, everything is read through squeue, which loses only that record.
        return self._read(_whole, super()._read_all, "observe")

    def _read_jobs(self) -> tuple[SlurmJob, ...]:
        return self._read(read_jobs, super()._read_jobs, "jobs")

    def _read_job(self, job_id: int) -> tuple[SlurmJob, ...]:
        return self._read(read_jobs, lambda: ScontrolClient._read_job(self, job_id), "jobs", only=job_id)

    def _read(
        self, understood: Callable[[object], _T], otherwise: Callable[[], _T], do: str, **arguments: object
    ) -> _T:
        worker = self._ready_worker()
        if worker is None:
            return otherwise()
        try:
            found = understood(worker.ask(do, self.timeout, **arguments))
        except WorkerHung as error:
            self._give_up(f"{do}: {error}")
            raise SlurmUnavailable(f"pyslurm, {do}: {error}") from None
        except RequestRefused as error:
            refusal = failure(("pyslurm", do), 1, str(error))
            self._give_up(str(refusal))
            if isinstance(refusal, SlurmUnavailable):
                raise refusal from None
            return otherwise()
        except (WorkerFailed, SlurmGarbled) as error:
            self._give_up(str(error))
            return otherwise()
        self._pause = FIRST_PAUSE_S
        self._log_once(logging.INFO, f"Slurm is read through pyslurm {worker.version}")
        return found

    def _ready_worker(self) -> PyslurmProcess | None:
        """Return a worker of the cluster's version; start one if needed.

        None while scontrol serves alone.
        """
        if self.worker is not None and time.monotonic() - self.worker.started_at > LIFETIME_S:
            self._end_worker()
        if self.worker is None and time.monotonic() >= self.paused_until:
            try:
                self.worker = self._matching_worker()
            except (WorkerFailed, SlurmError, OSError) as error:
                self._give_up(str(error))
        return self.worker

    def _matching_worker(self) -> PyslurmProcess:
        worker = PyslurmProcess(self._env, start_s=self.timeout)
        try:
            slurm = self._run("scontrol", "--version").strip()
            if _major(worker.version) is None or _major(worker.version) != _major(slurm):
                raise WorkerFailed(f"pyslurm {worker.version} is not for this Slurm, {slurm!r}")
        except BaseException:
            worker.close()
            raise
        return worker

    def _give_up(self, why: str) -> None:
        """End the worker, and let scontrol serve alone for a while."""
        self._end_worker()
        self.paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        self._log_once(None, why)

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.close()
            self.worker = None

    def _log_once(self, level: int | None, text: str) -> None:
        """Log a text once, not at every call.

        Without a level, the text is the reason why scontrol serves.
        """
        if text == self._logged:
            return
        before, self._logged = self._logged, text
        if level is not None:
            log.log(level, "%s", text)
        else:
            _log_fallback("pyslurm" if before else self._choice, text)


def _whole(answer: object) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...], Mapping[str, str]]:
    return *read_cluster(answer), {}


def _log_fallback(choice: Choice, why: str) -> None:
    """Log why scontrol serves.

    This is a warning where the configuration asks for pyslurm, or where pyslurm was in use.
    """
    log.log(
        logging.WARNING if choice == "pyslurm" else logging.INFO, "Slurm is read through scontrol: %s", why
    )


def _major(version: str) -> tuple[int, int] | None:
    """Read Slurm's major release from a version.

    Versions look like `slurm-wlm 26.05.5` or `26.5.2`. None where the text has no version.
    """
    found = re.search(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None
