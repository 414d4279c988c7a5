"""Fork one worker per GPU, and collect the workers at their end.

The process that forks has imported torch already.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import math
import mmap
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from pollux.errors import LEFT_STATUS, RETRY_STATUS, STOPPED_STATUS, RankLost
from pollux.launcher.messages import WorkerEnded
from pollux.slurm_job.call_site import RANK
from pollux.slurm_job.environment import LENT_RANKS

NOTE_BYTES = 496
ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
WATCHED = ENDING | {signal.SIGCHLD, signal.SIGIO}
"""Signals that the launcher blocks, and waits for."""
SUDDEN = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
"""Signals whose deaths are never a reaction to another rank's failure, as an exception or an abort may be."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


class Note(ctypes.Structure):
    """When and why a worker fails, in memory that it shares with its launcher, which finds the first failure by it."""

    _fields_ = (("why", ctypes.c_char * NOTE_BYTES), ("status", ctypes.c_uint8), ("at", ctypes.c_double))
    why: bytes
    status: int
    """The exit status that the worker wanted."""
    at: float
    """POSIX time; 0 where the worker noted nothing."""


class NodeWorkers:
    """This node's workers of one start."""

    def __init__(self, count: int, where: str, term: float) -> None:
        """`where` names the node. `term`: seconds from TERM to KILL, and again."""
        self.running: dict[int, int] = {}
        """Local ranks, by pid."""
        self.stopped_by = 0
        """The signal that asked to end, if any."""
        self._notes = (Note * count).from_buffer(mmap.mmap(-1, count * ctypes.sizeof(Note)))
        """By local rank."""
        self._where, self._term = where, term
        self._term_at = self._kill_at = math.inf
        self._killed_from = math.inf
        """When this launcher began to kill workers; POSIX time."""
        self._asked = False

    @property
    def due(self) -> float:
        """When the next signal is due."""
        return min(self._term_at, self._kill_at)

    def signal(self, number: int) -> None:
        for pid in self.running:
            # Not yet reaped, so the pid is still its own: it cannot have become another process's.
            os.kill(pid, number)

    def end(self, term_after: float, kill_after: float) -> None:
        """Send TERM and KILL after so many seconds, or as soon as was ordered before."""
        now = time.monotonic()
        self._term_at = min(self._term_at, now + term_after)
        self._kill_at = min(self._kill_at, now + kill_after)
        self.end_what_is_due()

    def stop(self, number: int, grace: float) -> None:
        """Pass on a signal that asks to end, and kill after `grace` seconds."""
        self.stopped_by = self.stopped_by or number
        self._asked = True
        self.signal(number)
        self._term_at, self._kill_at = math.inf, min(self._kill_at, time.monotonic() + grace)

    def end_what_is_due(self) -> None:
        now = time.monotonic()
        if now >= self._kill_at:
            self._asked, self._killed_from = True, min(self._killed_from, time.time())
            self.signal(signal.SIGKILL)
            # Again, for whatever was forked since.
            self._term_at, self._kill_at = math.inf, now + self._term
        elif now >= self._term_at:
            self._asked, self._term_at = True, math.inf
            self.signal(signal.SIGTERM)

    def reap(self) -> list[WorkerEnded]:
        """Collect ended workers, and the orphans adopted from them. One SIGCHLD may stand for several."""
        ended: list[WorkerEnded] = []
        while True:
            try:
                pid, raw = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if not pid:
                break
            local_rank = self.running.pop(pid, None)
            if local_rank is not None:
                code = os.waitstatus_to_exitcode(raw)
                ended.append(self._end_of(local_rank, pid, code if code >= 0 else 128 - code))
        if any(end.status > 128 for end in ended):
            kill_forks_of_the_dead(self.running)
        return ended

    def _end_of(self, local_rank: int, pid: int, status: int) -> WorkerEnded:
        at, where = time.time(), f"pid {pid}, {self._where}"
        note = self._notes[local_rank]
        if not note.at or not status:
            lost = status - 128 in SUDDEN and at < self._killed_from
            return WorkerEnded(local_rank, status, at, where, lost=lost, asked=self._asked)
        # The status that the worker wanted counts: another rank's end may have killed it while it exited.
        why = note.why.decode(errors="replace")
        return WorkerEnded(local_rank, note.status or status, note.at, where, why, asked=self._asked)

    def _fails(self, local_rank: int, status: int, why: str) -> None:
        """In a worker: note that it fails."""
        note = self._notes[local_rank]
        note.why, note.status = why.replace("\0", "\\0").encode(errors="replace")[:NOTE_BYTES], status
        note.at = time.time()

    def start(self, local_rank: int, env: Mapping[str, str], body: Callable[[], int]) -> None:
        """Fork a worker that runs `body` under `env` and default signals, and exits with its result."""
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid:
            self.running[pid] = local_rank
            return
        die_with_parent(parent)
        os.environ.update({**env, RANK: str(os.getpid())})
        own = WATCHED | {signal.SIGUSR1}
        for number in own:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, own)
        if local_rank:
            _without_stdin()
        try:
            code = body()
        except SystemExit as exit_:
            if exit_.code is None or isinstance(exit_.code, int):
                code = exit_.code or 0
            else:
                print(exit_.code, file=sys.stderr)
                code = 1
            if code:
                self._fails(local_rank, code, f"sys.exit({exit_.code!r})")
                sys.last_value = SystemExit(code)  # functions at exit may ask whether this rank failed
            if code in (LEFT_STATUS, STOPPED_STATUS):
                # The other ranks, or Slurm, wait for this one's end.
                end_at_once(code)
            raise SystemExit(code) from None
        except BaseException as error:
            code = _status_of(error)
            self._fails(local_rank, code, f"{type(error).__name__}: {error}")
            # Printed here, so that the trace begins in the user's script and not in the launcher.
            error.__traceback__ = _in_script(error.__traceback__)
            sys.last_value = error  # as the interpreter does: functions at exit may ask for it
            sys.excepthook(type(error), error, error.__traceback__)
        # Ends the worker through the interpreter's ordinary exit, so that atexit functions run.
        raise SystemExit(code)


def _status_of(error: BaseException) -> int:
    """The exit status of a rank that ends by an exception.

    While a companion job lends ranks, the job's own ranks can start again without them.
    """
    status = getattr(error, "exit_status", None)
    if isinstance(status, int):
        return status
    if os.environ.get(LENT_RANKS, "0") == "0":
        return 1
    # Only the agent sets the variable, so torch is there. Collectives of the script's own raise torch's errors.
    from pollux.ranks.control import lost_peer  # noqa: PLC0415

    return RETRY_STATUS if isinstance(error, RankLost) or lost_peer(error) else 1


def end_at_once(code: int) -> NoReturn:
    """End this process as the interpreter would, without freeing objects.

    With torch imported that takes a third of a second of CPU, in every process. Threads that are no daemons are waited
    for, functions registered with atexit run, and open files are flushed.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for layer in (io.TextIOBase, io.BufferedIOBase):
        # The standard streams may be among the objects that are hidden from the collector by now.
        for each in (sys.stdout, sys.stderr, *gc.get_objects()):
            if issubclass(type(each), layer):
                with contextlib.suppress(OSError, ValueError):
                    each.flush()
    os._exit(code)


def adopt_orphans() -> None:
    """Become the parent of all orphans among this process's descendants.

    prctl(2), PR_SET_CHILD_SUBREAPER. Otherwise data-loading processes and programs of a dead worker would keep the
    step's output and their GPU open.
    """
    _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_descendants() -> None:
    """Kill the remaining children of this process and theirs."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        # Their own children become ours when they end.
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def kill_forks_of_the_dead(workers: Collection[int]) -> None:
    """Kill what dead workers have forked without exec, as data loaders do.

    These processes hold the dead worker's connections open. The other ranks notice the death only when these
    connections close. Programs that a worker has started in the background stay.
    """
    mine = Path("/proc/self/cmdline").read_bytes()
    for pid in set(_children()) - set(workers):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes() == mine:
                os.kill(pid, signal.SIGKILL)


def _children() -> list[int]:
    """Processes whose parent is this one, from /proc/PID/stat. proc(5)."""
    me = str(os.getpid())
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            with open(f"/proc/{entry.name}/stat") as stat:
                # The name in parentheses may itself hold spaces and parentheses.
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == me:
            found.append(int(entry.name))
    return found


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the launcher dies. That includes kill -9. prctl(2), PR_SET_PDEATHSIG."""
    _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _in_script(trace: TracebackType | None) -> TracebackType | None:
    """The part of a trace below this launcher and runpy. All of it where nothing is below."""
    frame, started = trace, False
    while frame is not None:
        in_runpy = frame.tb_frame.f_code.co_filename == "<frozen runpy>"
        if started and not in_runpy:
            return frame
        started = started or in_runpy
        frame = frame.tb_next
    return trace


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _without_stdin() -> None:
    """One reader of standard input per node: the first worker."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
