"""Start, ask and kill the process that `pyslurm_worker` runs in."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

_WORKER = Path(__file__).with_name("pyslurm_worker.py")
_LONGEST_ANSWER = 1 << 28
_GRACE_S = 2.0
_WORDS = 300
"""How much of its last words a dead process is quoted with."""


class WorkerFailed(Exception):
    """The worker process ended or gave an invalid answer.

    The process no longer runs. The message says what happened.
    """


class WorkerHung(WorkerFailed):
    """The process did not answer in time and was killed."""


class RequestRefused(Exception):
    """Slurm refused the request or did not answer.

    The message is Slurm's own. The worker process still works.
    """


class PyslurmProcess:
    """One worker process.

    It lives until it fails, until `close` is called or until this object is garbage-collected.

    Args:
        environment: the worker's whole environment. If SLURM_CONF is set in it, that file names the cluster.
        start_s: the longest that Python and the import of pyslurm may take [s].
        worker: the program that the process runs.
        longest_answer: the most bytes of an answer.
        grace_s: how long the end of the process may take once its pipe is closed [s].

    Raises:
        WorkerFailed: the worker did not start.
        WorkerHung: the worker did not start in time.
    """

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        start_s: float,
        worker: Path = _WORKER,
        longest_answer: int = _LONGEST_ANSWER,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._longest_answer, self._grace_s = longest_answer, grace_s
        self._asked = 0
        self._left = b""
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            # -P: the modules that lie beside the worker must not pass for others of the same names.
            [sys.executable, "-P", str(worker)],
            # Imported, pyslurm would call slurm_init() by itself, which without slurm.conf ends the process.
            # SLURM_BITSTR_LEN=0: libslurm writes the waiting tasks of an array whole, and not in 64 bytes.
            env={**environment, "PYSLURM_DISABLE_AUTO_INIT": "1", "SLURM_BITSTR_LEN": "0"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            bufsize=0,
            start_new_session=True,  # a Ctrl-C in polluxd's terminal is polluxd's alone
        )
        self._end = weakref.finalize(self, _end, self.process, self._words)
        self.started_at = time.monotonic()
        hello = self._answer(start_s)
        if not isinstance(hello.get("pyslurm"), str):
            why = hello.get("unusable", f"it began with {hello!r:.{_WORDS}}")
            self.close()
            raise WorkerFailed(f"pyslurm is not usable: {why}")
        self.version: str = hello["pyslurm"]
        """`pyslurm.__version__`."""

    @property
    def alive(self) -> bool:
        return self._end.alive and self.process.poll() is None

    def ask(self, do: str, timeout: float, **arguments: object) -> Any:
        """Make a request and return its result.

        Raises:
            RequestRefused: Slurm refused the request or did not answer.
            WorkerFailed: the worker gave no usable answer; the request may have been carried out.
            WorkerHung: the worker gave no answer in time; the request may have been carried out.
        """
        self._asked += 1
        request = json.dumps({"id": self._asked, "do": do, **arguments}).encode() + b"\n"
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(request)
        except OSError:
            raise self._dead() from None
        answer = self._answer(timeout)
        if answer.get("id") != self._asked or len(answer) != 2:
            self.close()
            raise WorkerFailed(f"expected the answer to request {self._asked}, got {answer!r:.{_WORDS}}")
        if "refused" in answer:
            raise RequestRefused(str(answer["refused"]))
        if "done" not in answer:
            self.close()
            raise WorkerFailed(f"{do}: {answer.get('fault')}")
        return answer["done"]

    def close(self) -> None:
        """Kill the worker. May be called again."""
        self._end()

    def _answer(self, timeout: float) -> dict[str, Any]:
        line = self._line(timeout)
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            self.close()
            raise WorkerFailed(f"expected one JSON object a line, got {line[:_WORDS]!r}")
        return answer

    def _line(self, timeout: float) -> bytes:
        """Read the next line, and return it without its end."""
        assert self.process.stdout is not None
        out, deadline = self.process.stdout.fileno(), time.monotonic() + timeout
        parts = [self._left]
        size = len(self._left)
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            while b"\n" not in parts[-1]:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise WorkerHung(f"no answer within {timeout:g} s")
                part = os.read(out, 1 << 20)
                parts.append(part)
                size += len(part)
                if not part:
                    raise self._dead()
                if size > self._longest_answer:
                    self.close()
                    raise WorkerFailed(f"an answer of more than {self._longest_answer} bytes")
        last, _, self._left = parts.pop().partition(b"\n")
        return b"".join([*parts, last])

    def _dead(self) -> WorkerFailed:
        try:
            status = f"exit status {self.process.wait(self._grace_s)}"
        except subprocess.TimeoutExpired:
            status = "its pipe closed"
        self._words.seek(max(0, self._words.seek(0, os.SEEK_END) - _WORDS))
        words = " ".join(self._words.read().decode(errors="replace").split())
        self.close()
        return WorkerFailed(f"the process ended ({status}): {words or 'without a word'}")


def _end(process: subprocess.Popen[bytes], words: IO[bytes]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout, words):
        if pipe is not None:
            pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: reaped some other time
        process.wait(_GRACE_S)
