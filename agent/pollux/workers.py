"""Fork one worker per GPU from a process that has imported torch already, and see them through.

The supervisor installs no Python signal handler: all signals that concern it are blocked, and one loop takes
them with sigtimedwait, so none is lost and none interrupts anything. Workers start with these unblocked and at
their defaults, save that USR1 stays blocked (see wake).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from pollux.wake import WAKE_SIGNAL

WATCHED = {
    signal.SIGCHLD,
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    WAKE_SIGNAL,
}
TERM_GRACE_S = 10.0
"""From TERM to KILL: within Slurm's default KillWait of 30 s, so workers end before the launcher is killed."""
SIBLING_GRACE_S = 3.0
"""How long workers live on after one has died: long enough for them to print why they fail."""
NOTE_BYTES = 512
_PR_SET_PDEATHSIG = 1


@dataclass(slots=True)
class Worker:
    """One forked worker process."""

    rank: int
    local_rank: int
    pid: int
    status: int | None = None
    """Exit status as a shell gives it: 128 + n after signal n."""
    ended_at: float = field(default=0.0)


class Notes:
    """Shared memory in which a worker leaves when and why it fails, to tell the first failure apart."""

    def __init__(self, workers: int) -> None:
        self._memory = mmap.mmap(-1, workers * NOTE_BYTES)

    def write(self, local_rank: int, text: str) -> None:
        raw = text.encode(errors="replace")[: NOTE_BYTES - 12]
        start = local_rank * NOTE_BYTES
        self._memory[start : start + 12 + len(raw)] = struct.pack("<dI", time.time(), len(raw)) + raw

    def read(self, local_rank: int) -> tuple[float, str] | None:
        start = local_rank * NOTE_BYTES
        at, length = struct.unpack_from("<dI", self._memory, start)
        if not at:
            return None
        return at, self._memory[start + 12 : start + 12 + length].decode(errors="replace")


def start_worker(
    rank: int, local_rank: int, env: Mapping[str, str], body: Callable[[], int], notes: Notes
) -> Worker:
    """Fork a worker that runs `body` under `env` and exits with what it returns."""
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return Worker(rank, local_rank, pid)
    _die_with_parent(parent)
    os.environ.update(env)
    for number in WATCHED - {WAKE_SIGNAL}:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WATCHED - {WAKE_SIGNAL})
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
            notes.write(local_rank, f"sys.exit({exit_.code!r})")
        raise SystemExit(code) from None
    except BaseException as error:
        notes.write(local_rank, f"{type(error).__name__}: {error}")
        # Printed here, so that the trace begins in the user's script and not in the launcher.
        sys.excepthook(type(error), error, _in_script(error.__traceback__))
        code = 1
    # Ends the worker through the interpreter's ordinary exit, so that atexit functions run.
    raise SystemExit(code)


def supervise(workers: Sequence[Worker], notes: Notes, *, say: Callable[[str], None]) -> int:
    """Wait until all workers have ended; end the others when one fails. Returns the first failure's status, or 0.

    USR1 is passed on to the workers. TERM, INT, HUP and QUIT are passed on too, and what is left after
    TERM_GRACE_S is killed; the status is then 128 + the signal's number.
    """
    running = {worker.pid: worker for worker in workers}
    asked_to_end: int | None = None
    kill_at: float | None = None
    term_at: float | None = None
    failed = False
    while running:
        now = time.monotonic()
        due = [at for at in (kill_at, term_at) if at is not None]
        timeout = min(max(min(due) - now, 0.0), 60.0) if due else 60.0
        taken = signal.sigtimedwait(WATCHED, timeout)
        if taken is not None and taken.si_signo != signal.SIGCHLD:
            number = taken.si_signo
            _signal_all(running, number)
            if number != WAKE_SIGNAL:
                asked_to_end = asked_to_end or number
                kill_at = kill_at or time.monotonic() + TERM_GRACE_S
        for worker in _reap(running):
            if worker.status and not failed and asked_to_end is None:
                failed = True
                term_at = time.monotonic() + SIBLING_GRACE_S
        now = time.monotonic()
        if term_at is not None and now >= term_at:
            _signal_all(running, signal.SIGTERM)
            term_at, kill_at = None, kill_at or now + TERM_GRACE_S
        if kill_at is not None and now >= kill_at:
            _signal_all(running, signal.SIGKILL)
            kill_at = now + TERM_GRACE_S
    if asked_to_end is not None:
        return 128 + asked_to_end
    return _tell_failures(workers, notes, say)


def _reap(running: dict[int, Worker]) -> list[Worker]:
    """Collect every worker that has ended; one SIGCHLD may stand for several."""
    ended = []
    for pid in list(running):
        done, raw = os.waitpid(pid, os.WNOHANG)
        if done:
            worker = running.pop(pid)
            code = os.waitstatus_to_exitcode(raw)
            worker.status = code if code >= 0 else 128 - code
            worker.ended_at = time.time()
            ended.append(worker)
    return ended


def _tell_failures(workers: Sequence[Worker], notes: Notes, say: Callable[[str], None]) -> int:
    failures = []
    for worker in workers:
        if worker.status:
            at, why = notes.read(worker.local_rank) or (worker.ended_at, describe_status(worker.status))
            failures.append((at, worker.rank, worker, why))
    if not failures:
        return 0
    _, rank, first, why = min(failures, key=lambda failure: failure[:2])
    status = first.status or 1
    others = len(failures) - 1
    ended = f"; {others} other rank(s) of this node ended after it" if others else ""
    say(f"rank {rank} (pid {first.pid}) failed first: {why} (exit status {status}){ended}")
    return status


def describe_status(status: int) -> str:
    """Say in words how a process ended, from its shell-like exit status."""
    if status <= 128:
        return f"exited with status {status}"
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"exited with status {status}"
    hint = " (out of memory, or someone's kill -9)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"


def _signal_all(running: Mapping[int, Worker], number: int) -> None:
    for pid in running:
        # Not yet reaped, so the pid is still its own: it cannot have become another process's.
        os.kill(pid, number)


def _die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the launcher dies, kill -9 included. prctl(2), PR_SET_PDEATHSIG."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def _in_script(trace: TracebackType | None) -> TracebackType | None:
    """The part of a trace below this launcher and runpy; all of it where nothing is below."""
    here = str(Path(__file__).parent)
    frame = trace
    while frame is not None:
        name = frame.tb_frame.f_code.co_filename
        if not name.startswith((here, "<frozen")):
            return frame
        frame = frame.tb_next
    return trace


def _without_stdin() -> None:
    """One reader of standard input per node: the first worker."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
