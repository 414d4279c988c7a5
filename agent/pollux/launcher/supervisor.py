"""See a node's workers through to their end, together with the launchers of the job's other nodes.

No Python signal handler is installed: all signals that matter here are blocked, and one loop takes them with
sigtimedwait, so none is lost and none interrupts anything. SIGIO tells of messages from other launchers (link), from
rank 0 (launcher_line), and of the end of a companion's parent (invitation).

When a worker fails, its launcher alerts all others at once; every launcher gives its own workers a moment to say
what they saw, then ends them. Each then reports its first failure to node 0, which names the earliest of all as
the cause: that is the exit status of every launcher, and so of srun.

When rank 0 announces a move, node 0's launcher passes it on. On a node that leaves, and everywhere in a relaunch,
the workers may end in any way, and are made to within a bound: nothing of that is a failure. A leaving launcher then
ends with status 0; in a relaunch node 0 has the others start workers anew as soon as all of that is over.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from pollux.errors import LEFT_STATUS, RELAUNCH_STATUS, RETRY_STATUS
from pollux.launcher.companion_file import Parent
from pollux.launcher.launcher_channel import Channel, Link, Message, free_port
from pollux.launcher.membership import Departure, Roll
from pollux.launcher.outcome import Again, Failure, Outcome, Resized, describe_status
from pollux.launcher.workers import Notes, Worker, kill_descendants, reap
from pollux.slurm_job.wake_signal import WAKE_SIGNAL

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
WATCHED = ENDING | {signal.SIGCHLD, signal.SIGIO, WAKE_SIGNAL}
MOVED = {LEFT_STATUS, RELAUNCH_STATUS}

SIBLING_GRACE_S = 3.0
"""How long workers live on after one has died: long enough for them to print why they fail."""
TERM_GRACE_S = 10.0
"""From TERM to KILL: within Slurm's default KillWait of 30 s, so workers end before the launcher is killed."""
LEAVE_GRACE_S = 8.0
"""How long workers have to end by themselves once the first of those has that a move ends, or rank 0 waits for it. With
as long again from TERM to KILL, all are gone before rank 0 stops waiting and Slurm takes their node."""
SUDDEN = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
"""Deaths that are never an answer to another rank's failure, as an exception or an abort may be."""
HEAD_START_S = 1.0
"""By how much a sudden death counts as earlier than it was seen: the other ranks see its connections close, and
raise, before this process is told of it."""
VERDICT_WAIT_S = SIBLING_GRACE_S + TERM_GRACE_S + 5.0
"""How long node 0 waits for the other nodes' reports of a failure."""
RELAUNCH_WAIT_S = 2 * LEAVE_GRACE_S + 4.0
"""How long node 0 waits for all workers to end in a relaunch."""


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a start of the workers is part of. `where` names this node in messages."""

    where: str
    may_restart: bool = False
    may_retry: bool = False
    resized: Resized = field(default_factory=Resized)
    """Of the starts before."""
    parent: Parent | None = None
    """The job whose companion this one is: the ranks it was lent may leave at any time."""


class Supervisor:
    """One start of one node's workers. `line` is node 0's to rank 0."""

    def __init__(
        self,
        workers: Iterable[Worker],
        notes: Notes,
        link: Link,
        standing: LaunchContext,
        line: Channel | None = None,
    ) -> None:
        self._workers = list(workers)
        self._running = {worker.pid: worker for worker in self._workers}
        self._notes = notes
        self._link = link
        self._standing = standing
        self._roll = Roll(link, line, standing.resized)
        self._move: Departure | None = None
        """The newest one that was announced."""
        self._reports: dict[int, Failure | None] = {}
        """Node 0 only: what each node has reported at its end."""
        self._verdict: Outcome | None = None
        self._lost: Failure | None = None
        self._ended_by: int | None = None
        self._reported = False
        self._alerted = False
        self._hurried = False
        """Those whom the newest move ends have to by a certain time."""
        self._asked = False
        """Workers have ended as in a move; node 0 knows whether there is one."""
        self._orphaned: Failure | None = None
        self._term_at: float | None = None
        self._kill_at: float | None = None
        self._ended_from = self._killed_from = math.inf
        """When this launcher began to end workers itself, and when to kill them; POSIX times."""
        self._verdict_by: float | None = None

    @property
    def moved(self) -> bool:
        """Whether rank 0 has announced a move in this start."""
        return self._move is not None

    @property
    def oddly_ended(self) -> Failure | None:
        """The first worker that a move was to end, and that ended in a way of its own."""
        if self._move is None or not self._move.ends(self._link.node_rank):
            return None
        odd = (
            w for w in self._workers if w.status and w.status not in MOVED and w.ended_at < self._ended_from
        )
        return min(map(self._failure_of, odd), key=_earliness, default=None)

    def wait(self) -> Outcome:
        """Return when all workers of this node have ended and the cause of a failure is agreed."""
        while True:
            self._end_what_is_due()
            self._hear()
            if not self._running:
                if self._ended_by is not None:
                    kill_descendants()
                    return Outcome(ended_by=self._ended_by)
                self._report()
                if self._verdict is not None:
                    if self._verdict != Outcome():
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
                note = self._notes.read(worker.local_rank)
                if note is not None and worker.status:
                    # It counts what the worker meant: another's end may have ended it on its way out.
                    worker.status = note.status or worker.status
                if worker.status and self._ended_by is None:
                    self._mind(worker.status)
        elif number == WAKE_SIGNAL:
            self._signal_workers(WAKE_SIGNAL)
        elif number in ENDING:
            self._ended_by = self._ended_by or number
            self._signal_workers(number)
            self._kill_at = self._kill_at or time.monotonic() + TERM_GRACE_S

    def _mind(self, status: int) -> None:
        """A worker has ended with a status other than 0."""
        self._hear_rank_0()
        if self._excused(status):
            self._hurry()
            return
        if status in MOVED and not self._link.is_hub:
            # The answer is an alert, where the move that would explain this is not on the line already.
            self._asked = True
            self._link.tell({"type": "ask"})
        else:
            self._alert()

    def _excused(self, status: int) -> bool:
        """Whether a worker of this node may end so."""
        if self._move is not None and self._move.ends(self._link.node_rank):
            return True
        return self._standing.parent is not None and status == LEFT_STATUS

    def _signal_workers(self, number: int) -> None:
        for pid in self._running:
            # Not yet reaped, so the pid is still its own: it cannot have become another process's.
            os.kill(pid, number)

    def _end_what_is_due(self) -> None:
        now = time.monotonic()
        if self._term_at is not None and now >= self._term_at:
            self._ended_from = min(self._ended_from, time.time())
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
        self._link.tell({"type": "alert"})

    def _begin(self, move: Departure) -> None:
        """Rank 0 has announced a move."""
        self._move, self._hurried, self._asked = move, False, False
        me = self._link.node_rank
        if not move.ends(me):
            # The agent numbers its ranks anew, and so do messages.
            before = sum(self._link.workers[node] for node in move.leaving if node < me)
            for worker in self._workers:
                worker.rank -= before
        elif any(worker.status for worker in self._workers):
            # They were quicker than the word of it.
            self._hurry()

    def _hurry(self) -> None:
        """The first of those whom the newest move ends has ended, or rank 0 waits for them.

        Not so one with status 0: then training was over before the step that the move was for.
        """
        move, now = self._move, time.monotonic()
        if move is None or self._hurried:
            return
        self._hurried = True
        if move.ends(self._link.node_rank):
            self._term_at, self._kill_at = now + LEAVE_GRACE_S, now + 2 * LEAVE_GRACE_S
            if self._link.is_hub:
                self._verdict_by = now + RELAUNCH_WAIT_S
        self._link.tell({"type": "hurry", "id": move.move_id})

    def _first_failure(self) -> Failure | None:
        failures = [self._lost] if self._lost is not None else []
        failures += [self._failure_of(w) for w in self._workers if w.status and not self._excused(w.status)]
        if failures and self._orphaned is not None:
            failures.append(self._orphaned)
        return min(failures, key=_earliness, default=None)

    def _failure_of(self, worker: Worker) -> Failure:
        status, note = worker.status or 0, self._notes.read(worker.local_rank)
        if note is not None:
            at, why = note.at, note.why
        else:
            sudden = status - 128 in SUDDEN and worker.ended_at < self._killed_from
            at, why = worker.ended_at - (HEAD_START_S if sudden else 0.0), describe_status(status)
        return Failure(at, worker.rank, status, why, f"pid {worker.pid}, {self._standing.where}")

    # -- the other launchers ----------------------------------------

    def _report(self) -> None:
        """This node's workers have ended: tell node 0, or decide."""
        link = self._link
        if self._move is not None and link.node_rank in self._move.leaving:
            link.tell({"type": "left"})
            self._verdict = Outcome(left=True)
            return
        if self._asked and not self._alerted and link.channels:
            return
        mine = self._first_failure()
        if not self._reported:
            self._reported = True
            self._reports[link.node_rank] = mine
            if not link.is_hub:
                link.tell({"type": "done", "failure": asdict(mine) if mine else None})
        if link.is_hub:
            self._decide()
        elif self._verdict is None and (not link.channels or self._overdue()):
            # Node 0 is gone, and with it whoever would have said more.
            self._verdict = Outcome(mine)

    def _decide(self) -> None:
        link, roll = self._link, self._roll
        everybody, overdue = roll.staying <= self._reports.keys(), self._overdue()
        if not everybody and not overdue:
            return
        relaunch = self._relaunches
        failures = [self._reports[node] for node in roll.staying & self._reports.keys()]
        if relaunch and not everybody:
            failures.append(self._stuck(min(roll.staying - self._reports.keys())))
        known = [failure for failure in failures if failure is not None]
        first = min(known, key=_earliness, default=None)
        again = None
        asked = first is not None and self._asks(first)
        if relaunch if first is None else (asked or self._standing.may_restart):
            # Slurm takes the nodes that leave as soon as the next rank 0 says that they are free.
            if roll.leaving and not overdue:
                self._verdict_by = self._verdict_by or time.monotonic() + RELAUNCH_WAIT_S
                return
            if everybody and roll.staying <= {0, *(channel.node for channel in link.channels)}:
                again = Again(free_port(), tuple(sorted(roll.staying)), roll.resized, asked)
        self._verdict = Outcome(first, again=again)
        link.tell(self._verdict.message())

    def _asks(self, failure: Failure) -> bool:
        """Whether a rank has asked for another start of all, and gets one."""
        # NCCL's watchdog aborts a process where another's node is lost.
        aborted = self._lent and failure.status == 128 + signal.SIGABRT
        return (failure.status == RETRY_STATUS or aborted) and (self._standing.may_retry or self.moved)

    def _stuck(self, node: int) -> Failure:
        why = "its workers did not end in time to be started again"
        return Failure(time.time(), self._rank_of(node), 1, why, f"node {node} of the step")

    def _rank_of(self, node: int) -> int:
        """The rank of a node's first worker as the agent counts now."""
        return sum(self._link.workers[other] for other in self._roll.staying if other < node)

    @property
    def _lent(self) -> bool:
        """Companions lend ranks, which may be lost at any time."""
        return self._move is not None and self._move.lent

    @property
    def _relaunches(self) -> bool:
        return self._move is not None and self._move.relaunch

    def _overdue(self) -> bool:
        return self._verdict_by is not None and time.monotonic() >= self._verdict_by

    def _hear(self) -> None:
        self._hear_rank_0()
        for node, message in self._link.heard():
            # What a node says of its end may be explained by what rank 0 has said before.
            self._hear_rank_0()
            try:
                self._understand(node, message)
            except (KeyError, TypeError, ValueError):
                # The line is authenticated, so this is another version of this program: the exit statuses suffice.
                continue
        parent = self._standing.parent
        if parent is not None and self._orphaned is None and self._running and parent.gone():
            why = "the job that this one is a companion of has ended, or started again"
            self._orphaned = Failure(time.time(), self._workers[0].rank, 1, why, self._standing.where)
            self._term_at = time.monotonic() + SIBLING_GRACE_S

    def _hear_rank_0(self) -> None:
        if self._alerted or self._ended_by is not None:
            self._roll.refuse("the ranks are being ended")
            return
        for news in self._roll.announced():
            if isinstance(news, Departure):
                self._link.tell(news.message())
                self._begin(news)
            else:
                self._hurry_for(news)

    def _hurry_for(self, move_id: int) -> None:
        if self._move is not None and self._move.move_id == move_id:
            self._hurry()

    def _understand(self, node: int, message: Message) -> None:
        ends = self._move is not None and self._move.ends(node)
        match message["type"]:
            case "move":
                self._begin(Departure.from_message(message))
            case "hurry":
                self._hurry_for(int(message["id"]))
            case "ask" if not ends:
                self._alert()
            case "alert" if not (ends and self._link.is_hub):
                self._alert()
            case "done":
                self._reports[node] = None if ends else Failure.from_message(message["failure"])
                if self._reports[node] is not None:
                    self._alert()
            case "outcome":
                self._verdict = Outcome.from_message(message)
            case "gone" if self._verdict is None and self._ended_by is None:
                self._lose(node)

    def _lose(self, node: int) -> None:
        """A launcher has gone without a report: its node failed, or somebody killed it."""
        if self._link.is_hub:
            if node in self._roll.leaving:
                self._roll.gone(node)
            elif node not in self._reports or self._relaunches:
                why = f"the launcher of node {node} has gone without a word (node failure, or killed)"
                rank, where = self._rank_of(node), f"node {node} of the step"
                self._reports[node] = Failure(time.time(), rank, 1, why, where)
                self._alert()
        elif self._running or self._relaunches:
            why = "the launcher of node 0 has gone without a word (node failure, or killed)"
            self._lost = Failure(time.time(), 0, 1, why, "node 0 of the step")
            self._alert()


def _earliness(failure: Failure) -> tuple[float, int]:
    return failure.at, failure.rank
