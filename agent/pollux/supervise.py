"""See a node's workers through to their end, together with the launchers of the job's other nodes.

No Python signal handler is installed: all signals that matter here are blocked, and one loop takes them with
sigtimedwait, so none is lost and none interrupts anything. SIGIO tells of messages from other launchers (link).

When a worker fails, its launcher alerts all others at once; every launcher gives its own workers a moment to say
what they saw, then ends them. Each then reports its first failure to node 0, which names the earliest of all as
the cause: that is the exit status of every launcher, and so of srun.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from pollux.errors import RETRY_STATUS
from pollux.link import Link, Message, free_port
from pollux.wake import WAKE_SIGNAL
from pollux.workers import Notes, Worker, kill_descendants, reap

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
WATCHED = ENDING | {signal.SIGCHLD, signal.SIGIO, WAKE_SIGNAL}

SIBLING_GRACE_S = 3.0
"""How long workers live on after one has died: long enough for them to print why they fail."""
TERM_GRACE_S = 10.0
"""From TERM to KILL: within Slurm's default KillWait of 30 s, so workers end before the launcher is killed."""
SUDDEN = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
"""Deaths that are never an answer to another rank's failure, as an exception or an abort may be."""
HEAD_START_S = 1.0
"""By how much a sudden death counts as earlier than it was seen: the other ranks see its connections close, and
raise, before this process is told of it."""
VERDICT_WAIT_S = SIBLING_GRACE_S + TERM_GRACE_S + 5.0
"""How long node 0 waits for the other nodes' reports of a failure."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The first worker of a node, or of the job, that failed. `at` is a POSIX time, `status` a shell's."""

    at: float
    rank: int
    status: int
    why: str
    where: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a start of the workers ended."""

    failure: Failure | None = None
    ended_by: int | None = None
    """The signal that asked this launcher to end."""
    restart_port: int | None = None
    """MASTER_PORT of the next start, where the workers are to be started again."""

    @property
    def status(self) -> int:
        """Exit status of the launcher."""
        if self.ended_by is not None:
            return 128 + self.ended_by
        return self.failure.status if self.failure is not None else 0


class Supervisor:
    """One start of one node's workers. `where` names this node in messages."""

    def __init__(
        self,
        workers: Iterable[Worker],
        notes: Notes,
        *,
        where: str,
        link: Link | None,
        may_restart: bool = False,
        may_retry: bool = False,
    ) -> None:
        self._workers = list(workers)
        self._running = {worker.pid: worker for worker in self._workers}
        self._notes = notes
        self._where = where
        self._link = link
        self._may_restart, self._may_retry = may_restart, may_retry
        self._reports: dict[int, Failure | None] = {}
        """Node 0 only: what each node has reported at its end."""
        self._verdict: Verdict | None = None
        self._lost: Failure | None = None
        self._ended_by: int | None = None
        self._reported = False
        self._alerted = False
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._killed_from = math.inf
        """When this launcher began to kill workers itself; a POSIX time."""
        self._verdict_by: float | None = None

    def wait(self) -> Verdict:
        """Return when all workers of this node have ended and the cause of a failure is agreed."""
        while True:
            self._end_what_is_due()
            self._hear()
            if not self._running:
                if self._ended_by is not None:
                    kill_descendants()
                    return Verdict(ended_by=self._ended_by)
                self._report()
                if self._verdict is not None:
                    if self._verdict.failure is not None:
                        kill_descendants()
                    return self._verdict
            taken = signal.sigtimedwait(WATCHED, self._patience())
            if taken is not None:
                self._take(taken.si_signo)

    def _patience(self) -> float:
        due = [at for at in (self._term_at, self._kill_at, self._verdict_by) if at is not None]
        return min(max(min(due, default=60.0 + time.monotonic()) - time.monotonic(), 0.0), 60.0)

    # -- signals and workers ----------------------------------------

    def _take(self, number: int) -> None:
        if number == signal.SIGCHLD:
            for worker in reap(self._running):
                if worker.status and self._ended_by is None:
                    self._alert()
        elif number == WAKE_SIGNAL:
            self._signal_workers(WAKE_SIGNAL)
        elif number in ENDING:
            self._ended_by = self._ended_by or number
            self._signal_workers(number)
            self._kill_at = self._kill_at or time.monotonic() + TERM_GRACE_S

    def _signal_workers(self, number: int) -> None:
        for pid in self._running:
            # Not yet reaped, so the pid is still its own: it cannot have become another process's.
            os.kill(pid, number)

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._signal_workers(signal.SIGTERM)
            self._term_at, self._kill_at = None, self._kill_at or now + TERM_GRACE_S
        if self._kill_at is not None and now >= self._kill_at:
            self._killed_from = min(self._killed_from, time.time())
            self._signal_workers(signal.SIGKILL)
            self._kill_at = now + TERM_GRACE_S

    def _alert(self) -> None:
        """A rank has failed, here or elsewhere: the others cannot go on without it."""
        if self._alerted:
            return
        self._alerted = True
        self._term_at = time.monotonic() + SIBLING_GRACE_S
        self._verdict_by = time.monotonic() + VERDICT_WAIT_S
        if self._link is not None:
            self._link.tell({"type": "alert"})

    def _first_failure(self) -> Failure | None:
        failures = [self._lost] if self._lost is not None else []
        for worker in self._workers:
            if worker.status:
                sudden = worker.status - 128 in SUDDEN and worker.ended_at < self._killed_from
                at, why = self._notes.read(worker.local_rank) or (
                    worker.ended_at - (HEAD_START_S if sudden else 0.0),
                    describe_status(worker.status),
                )
                failures.append(
                    Failure(at, worker.rank, worker.status, why, f"pid {worker.pid}, {self._where}")
                )
        return min(failures, key=lambda failure: (failure.at, failure.rank), default=None)

    # -- the other launchers ----------------------------------------

    def _report(self) -> None:
        """This node's workers have ended: tell node 0, or decide."""
        mine = self._first_failure()
        if self._link is None:
            restart = free_port() if mine is not None and self._restarts(mine) else None
            self._verdict = Verdict(mine, restart_port=restart)
            return
        if not self._reported:
            self._reported = True
            self._reports[self._link.node_rank] = mine
            if not self._link.is_hub:
                self._link.tell({"type": "done", "failure": asdict(mine) if mine else None})
        if self._link.is_hub:
            self._decide(self._link)
        elif self._verdict is None and (not self._link.channels or self._overdue()):
            # Node 0 is gone, and with it whoever would have said more.
            self._verdict = Verdict(mine)

    def _decide(self, link: Link) -> None:
        everybody = len(self._reports) == len(link.workers)
        if not everybody and not self._overdue():
            return
        failures = [failure for failure in self._reports.values() if failure is not None]
        first = min(failures, key=lambda failure: (failure.at, failure.rank), default=None)
        complete = everybody and len(link.channels) == len(link.workers) - 1
        restart = free_port() if first is not None and self._restarts(first) and complete else None
        link.tell({"type": "verdict", "failure": asdict(first) if first else None, "restart": restart})
        self._verdict = Verdict(first, restart_port=restart)

    def _restarts(self, failure: Failure) -> bool:
        """Whether all ranks are started again after this first failure; or because a rank has asked for it."""
        return self._may_restart or (self._may_retry and failure.status == RETRY_STATUS)

    def _overdue(self) -> bool:
        return self._verdict_by is not None and time.monotonic() >= self._verdict_by

    def _hear(self) -> None:
        if self._link is None:
            return
        for node, message in self._link.heard():
            try:
                self._understand(node, message)
            except (KeyError, TypeError, ValueError):
                # The line is authenticated, so this is another version of this program: the exit statuses suffice.
                continue

    def _understand(self, node: int, message: Message) -> None:
        assert self._link is not None
        match message["type"]:
            case "alert":
                self._alert()
            case "done":
                self._reports[node] = _failure(message["failure"])
                if self._reports[node] is not None:
                    self._alert()
            case "verdict":
                restart = message["restart"]
                self._verdict = Verdict(
                    _failure(message["failure"]), restart_port=None if restart is None else int(restart)
                )
            case "gone" if self._verdict is None and self._ended_by is None:
                self._lose(self._link, node)

    def _lose(self, link: Link, node: int) -> None:
        """A launcher has gone without a report: its node failed, or somebody killed it."""
        if link.is_hub:
            if node in self._reports:
                return
            rank = sum(link.workers[:node])
            why = f"the launcher of node {node} has gone without a word (node failure, or killed)"
            self._reports[node] = Failure(time.time(), rank, 1, why, f"node {node} of the step")
            self._alert()
        elif self._running:
            why = "the launcher of node 0 has gone without a word (node failure, or killed)"
            self._lost = Failure(time.time(), 0, 1, why, "node 0 of the step")
            self._alert()


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


def describe(failure: Failure) -> str:
    """One line for the job's log."""
    return f"rank {failure.rank} ({failure.where}) failed first: {failure.why} (exit status {failure.status})"


def _failure(raw: Any) -> Failure | None:
    if raw is None:
        return None
    return Failure(float(raw["at"]), int(raw["rank"]), int(raw["status"]), str(raw["why"]), str(raw["where"]))
