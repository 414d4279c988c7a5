"""The trainer's processes: a command, and what it starts."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

from pollux.errors import LaunchError
from pollux.private_folder import PrivateFolder
from pollux.slurm_job import slurm_commands
from pollux.slurm_job.allocation import task_of

log = logging.getLogger("pollux")

_READ = 65536
SHELLS = {"bash", "busybox", "dash", "ksh", "sh", "zsh"}


@contextlib.contextmanager
def alone(folder: Path, attempt: int) -> Iterator[None]:
    """While no other wrapper of this attempt runs. Raises LaunchError."""
    with contextlib.ExitStack() as open_files:
        try:
            with PrivateFolder.make(folder) as private:
                lock = open_files.enter_context(private.change(f".wrap-{attempt}.lock"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LaunchError(
                "another `pollux wrap` of this job runs, and a move would end both where one has saved: run them one "
                "after another, or in a job each"
            ) from None
        except OSError as error:
            log.warning("other `pollux wrap` of this job are not seen: %s", error)
        yield


class TrainerProcess:
    """One start of the command. Raises LaunchError.

    `feed` gets the stream (0 or 1), what was printed, and when; it is passed on to this process's own stream.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], feed: Callable[[int, bytes, float], None]
    ) -> None:
        pipe = subprocess.PIPE
        try:
            self._child = subprocess.Popen(command, env=environ, stdout=pipe, stderr=pipe)
        except OSError as error:
            raise LaunchError(f"cannot start {command[0]}: {error}") from error
        self._feed = feed
        assert self._child.stdout is not None
        assert self._child.stderr is not None
        pairs = ((self._child.stdout, sys.stdout.buffer), (self._child.stderr, sys.stderr.buffer))
        self._pumps = [
            threading.Thread(target=self._pump, args=(number, *pair), daemon=True)
            for number, pair in enumerate(pairs)
        ]
        for pump in self._pumps:
            pump.start()

    def _pump(self, number: int, source: IO[bytes], onto: IO[bytes]) -> None:
        """Pass on what the trainer prints, as it comes."""
        while data := os.read(source.fileno(), _READ):
            with contextlib.suppress(OSError, ValueError):
                onto.write(data)
                onto.flush()
            self._feed(number, data, time.time())

    @property
    def status(self) -> int | None:
        """The command's exit status, as a shell gives it; None while it runs."""
        status = self._child.poll()
        return status if status is None or status >= 0 else 128 - status

    def join(self) -> None:
        """Read the rest of the output."""
        until = time.monotonic() + 5.0
        for pump in self._pumps:  # what the trainer has left behind may hold the pipe
            pump.join(max(until - time.monotonic(), 0.0))

    def pass_on(self, number: int) -> None:
        """Send a signal to the command alone, as if it had this process's place."""
        self._child.send_signal(number)

    def signal_trainer(self, number: signal.Signals, environ: Mapping[str, str]) -> None:
        """Send a signal to what trains.

        A shell ends at it at once, and leaves alone what it has started, so the programs below it get it. srun takes a
        TERM for an order to end at once, so Slurm has to pass it on to the tasks of all steps. `environ`: of the job.
        """
        for program, name in _programs(self._child.pid):
            if name == "srun":
                word = f"--signal={number.name.removeprefix('SIG')}"
                slurm_commands.run("scancel", word, task_of(environ), environ=environ)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(program, number)


def _programs(process: int) -> Iterator[tuple[int, str]]:
    """Yield a process and its program's name; of a shell, those that it waits for. proc(5)."""
    below: dict[int, list[int]] = {}
    for number in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            parent = int(
                Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()[1]
            )
            below.setdefault(parent, []).append(int(number))
    ways = [process]
    while ways:
        each = ways.pop()
        with contextlib.suppress(OSError):
            name = os.path.basename(os.readlink(f"/proc/{each}/exe"))
            if name in SHELLS and each in below:
                # What reads the trainer's output, such as `tee`, has to outlive it.
                ways += [one for one in below[each] if _input(one) in ("", _input(each))] or below[each]
            else:
                yield each, name


def _input(process: int) -> str:
    """Return the pipe that a process reads, or nothing."""
    with contextlib.suppress(OSError):
        if (found := os.readlink(f"/proc/{process}/fd/0")).startswith("pipe:"):
            return found
    return ""
