"""Slurm read through pyslurm where that can be used, else through commands.

pyslurm can be used where it is installed and its version is the cluster's. A poll then needs two commands fewer, since
pyslurm reads nodes and jobs. All changes to jobs go through scontrol: pyslurm's update leaves out the number of nodes,
its requeue would run a job again that has just ended.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

from polluxd.errors import SlurmUnavailable
from polluxd.slurm.commands import failure
from polluxd.slurm.protocol import SlurmClient
from polluxd.slurm.queue import Query
from polluxd.slurm.scontrol import ScontrolClient

log = logging.getLogger(__name__)

Choice = Literal["auto", "scontrol", "pyslurm"]

FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Pauses of pyslurm after a failure: commands serve alone, at first for 5 s, then twice as long each time."""

LIFETIME_S = 3600.0
"""A worker is replaced after this time, because it knows slurm.conf as it was when the worker started."""

_WORKER = Path(__file__).with_name("pyslurm_worker.py")
_LONGEST_ANSWER = 1 << 30
"""Bytes."""


def open_client(choice: Choice, *, conf: Path | None, timeout: float) -> SlurmClient:
    """Open the client that the configuration's `slurm.client` asks for.

    The log says which client it is, and why.
    """
    if choice == "scontrol":
        log.info("Slurm is read through scontrol: slurm.client says so")
        return ScontrolClient(conf=conf, timeout=timeout)
    try:
        version("pyslurm")
    except PackageNotFoundError:
        _log_fallback("pyslurm is not installed", warn=choice == "pyslurm")
        return ScontrolClient(conf=conf, timeout=timeout)
    return PyslurmClient(conf=conf, timeout=timeout, choice=choice)


class Worker:
    """One process that runs `pyslurm_worker`. It ends when it loses this object.

    Args:
        environment: the worker's whole environment. If SLURM_CONF is set in it, that file names the cluster.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.started_at = time.monotonic()
        self._pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                # -P: the modules that lie beside the worker must not pass for others of the same names.
                [sys.executable, "-P", str(_WORKER), str(theirs.fileno())],
                # libslurm is to write the waiting tasks of an array whole, and not in 64 bytes.
                env={**environment, "SLURM_BITSTR_LEN": "0"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in polluxd's terminal is polluxd's alone
            )

    def ask(self, request: object, timeout: float) -> Any:
        """Return the answer to a request. Raises TimeoutError, or EOFError or OSError where the process has ended."""
        self._pipe.send_bytes(json.dumps(request).encode())
        if not self._pipe.poll(timeout):
            raise TimeoutError
        return json.loads(self._pipe.recv_bytes(_LONGEST_ANSWER))

    def end(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()


class PyslurmClient(ScontrolClient):
    """A SlurmClient that asks a process with pyslurm first.

    A call takes at most `timeout`, as with commands. When the worker leaves a call unanswered, or slurmctld does not
    answer it, the client raises SlurmUnavailable. When Slurm refuses a reading, or the worker dies of it, commands read
    at once.
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
        self.worker: Worker | None = None
        self._pause = FIRST_PAUSE_S
        self.paused_until = float("-inf")
        self._logged = ""
        self._warn = choice == "pyslurm"
        """Whether it is a warning that commands serve."""

    def _ask_all(self, query: Query) -> tuple[str, str]:
        text = self._ask_pyslurm(query, None, nodes=True)
        if text is None:
            return super()._ask_all(query)
        jobs, end, nodes = text.rpartition(f"{query.end}\n")
        return jobs + end, nodes

    def _ask_jobs(self, query: Query, job_id: int | None = None) -> str:
        text = self._ask_pyslurm(query, job_id, nodes=False)
        return super()._ask_jobs(query, job_id) if text is None else text

    def _ask_pyslurm(self, query: Query, job_id: int | None, *, nodes: bool) -> str | None:
        """Return records as commands print them; None where commands have to serve."""
        if self.worker is not None and time.monotonic() - self.worker.started_at > LIFETIME_S:
            self._end_worker()
        if self.worker is None:
            if time.monotonic() < self.paused_until:
                return None
            ours, slurm = version("pyslurm"), self.ask("scontrol", "--version").strip()
            if _release(ours) is None or _release(ours) != _release(slurm):
                self._give_up(f"pyslurm {ours} is not for this Slurm, {slurm!r}")
                return None
            self.worker = Worker(self.environment)
        try:
            answer = self.worker.ask([query.format, job_id, nodes], self.timeout)
        except TimeoutError:
            self._give_up(f"pyslurm: no answer within {self.timeout:g} s")
            raise SlurmUnavailable(f"pyslurm: no answer within {self.timeout:g} s") from None
        except (EOFError, OSError, ValueError):
            self._give_up("pyslurm's process ended without an answer")
            return None
        if "refused" in answer:
            refusal = failure(("pyslurm",), 1, answer["refused"])
            self._give_up(str(refusal))
            if isinstance(refusal, SlurmUnavailable):
                raise refusal
            return None
        if "text" not in answer:
            self._give_up(f"pyslurm is not usable: {answer.get('fault')}")
            return None
        self._pause = FIRST_PAUSE_S
        if not self._logged.startswith("Slurm is read through pyslurm"):
            self._logged = f"Slurm is read through pyslurm {version('pyslurm')}"
            log.info("%s", self._logged)
        self._warn = True
        text: str = answer["text"]
        return text

    def _give_up(self, why: str) -> None:
        """End the worker, and let commands serve alone for a while."""
        self._end_worker()
        self.paused_until = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        if why != self._logged:
            self._logged = why
            _log_fallback(why, warn=self._warn)

    def _end_worker(self) -> None:
        if self.worker is not None:
            self.worker.end()
            self.worker = None


def _log_fallback(why: str, *, warn: bool) -> None:
    """Log why commands serve: a warning where the configuration asks for pyslurm, or it was in use."""
    log.log(logging.WARNING if warn else logging.INFO, "Slurm is read through scontrol: %s", why)


def _release(text: str) -> tuple[int, int] | None:
    """Read Slurm's major release from a version such as `slurm-wlm 26.05.5` or `26.5.2`; None: it has none."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else None
