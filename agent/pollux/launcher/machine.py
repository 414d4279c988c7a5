"""Decide what node 0's launcher does next.

A `StartMachine` takes what happens in one start of the workers, and says who is to be told what. It sends no message
and no signal itself: `supervisor` does. A start is in one of three phases:

TRAINING   the workers run
FAILING    a rank has failed: all workers end
STOPPING   a signal asks the job to end; workers have time to save

When all workers have ended, the earliest failure is named as the cause, and all start again if that is allowed, or if
new ranks can restore what a lost rank has left in memory. On a node that a move removes, workers may end in any way:
that is no failure.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Set
from dataclasses import dataclass
from enum import Enum

from pollux.errors import LEFT_STATUS, RETRY_STATUS, STOPPED_STATUS
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Leave,
    MoveAnswer,
    NodesLeft,
    Order,
    Signalled,
    Stop,
    WorkerEnded,
)

HEAD_START_S = 1.0
"""A death by a signal counts as so much earlier than seen: other ranks may raise before this process learns of it."""


class Phase(Enum):
    TRAINING = "training"
    FAILING = "failing"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class Graces:
    """How long things may take, in seconds."""

    sibling: float = 3.0
    """Workers live on after another has failed, to print why they fail."""
    term: float = 10.0
    """From TERM to KILL: within Slurm's default KillWait of 30 s, so workers end before the launcher is killed."""
    stop: float = 600.0
    """From a SIGTERM that asks this launcher to end to KILL: workers write their last checkpoint. Slurm, torchrun or
    Kubernetes end all of them sooner, when their own grace period is over."""
    leave: float = 8.0
    """Workers that a move removes may end by themselves, from the first one's end or from when rank 0 waits for them.
    With as long again from TERM to KILL, all are gone before rank 0 stops waiting and Slurm takes their node."""

    @property
    def after_failure(self) -> EndWorkers:
        return EndWorkers(self.sibling, self.sibling + self.term)

    def after(self, number: int) -> float:
        """From a signal that asks this launcher to end to KILL."""
        return self.stop if number == signal.SIGTERM else self.term

    @property
    def reports(self) -> float:
        """Node 0 waits for the ends of other nodes' workers after a failure."""
        return self.sibling + self.term + 5.0

    @property
    def gone(self) -> float:
        """Node 0 waits for nodes that leave before it starts the others again."""
        return 2 * self.leave + 4.0


@dataclass(frozen=True, order=True)
class Failure:
    """How a worker, or a node, failed. The least of several is the first."""

    at: float
    """POSIX time."""
    rank: int
    status: int
    """As a shell gives it."""
    why: str
    where: str

    def __str__(self) -> str:
        """One line for the job's log."""
        return f"rank {self.rank} ({self.where}) failed first: {self.why} (exit status {self.status})"


@dataclass(frozen=True)
class Resized:
    """The newest move that removed nodes; it is passed to the next start."""

    move_id: int = 0
    """polluxd's number of it; 0 where there was none."""
    left: tuple[str, ...] = ()
    """Slurm's names of the nodes that the move removed."""

    @property
    def environment(self) -> dict[str, str]:
        if not self.move_id:
            return {}
        return {"POLLUX_RESIZED": str(self.move_id), "POLLUX_LEFT": ",".join(self.left)}


@dataclass(frozen=True)
class Outcome:
    """How a start of the workers ended."""

    failure: Failure | None = None
    ended_by: int = 0
    """The signal that asked the job to end."""
    next_nodes: tuple[int, ...] = ()
    """Who takes part in the next start, in order, by the numbers of this one; empty: no start follows."""
    asked: bool = False
    """A rank was lost or asked for the next start: it does not count as a restart after a failure."""
    lost: bool = False
    """A node of the allocation takes no part any more: it was lost."""

    @property
    def status(self) -> int:
        """Exit status of the launchers."""
        if self.ended_by:
            return 128 + self.ended_by
        return self.failure.status if self.failure is not None else 0


@dataclass(frozen=True)
class StartTerms:
    """The nodes, the workers and the rules of one start."""

    workers: tuple[int, ...]
    """Workers of each node."""
    names: tuple[str, ...]
    """What Slurm calls each node."""
    resized: Resized = Resized()
    """Of the starts before."""
    may_restart: bool = False
    may_retry: bool = False
    companion: bool = False
    """The job lends its ranks to another: they may leave at any time."""
    graces: Graces = Graces()


class StartMachine:
    """What node 0's launcher knows of the running start. `conclude` follows each other call."""

    def __init__(
        self,
        terms: StartTerms,
        tell: Callable[[Set[int], Order], None],
        answer: Callable[[MoveAnswer | NodesLeft], None],
        restores: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        posix: Callable[[], float] = time.time,
    ) -> None:
        """`tell` orders the launchers of nodes, `answer` is for rank 0.

        `restores`: whether new ranks would restore the training's state after a loss.
        """
        self.terms, self._tell, self._answer, self._restores = terms, tell, answer, restores
        self._clock, self._posix = clock, posix
        self.phase = Phase.TRAINING
        self.outcome: Outcome | None = None
        """None until the start is over."""
        self.running = {node: set(range(workers)) for node, workers in enumerate(terms.workers)}
        """Each node's workers that run, by local rank."""
        self.staying = set(self.running)
        """Nodes that take part in the next start. Nodes keep their numbers until then."""
        self.connected = set(self.running)
        """Nodes whose launchers obey, this one among them."""
        self.resized = terms.resized
        self.move_id = 0
        """The newest move that was announced."""
        self._lent = 0
        """Ranks of companions in the job."""
        self._hurried = False
        """The workers that the newest move removes have been given their time to end."""
        self.failures: list[Failure] = []
        self.odd: Failure | None = None
        """The first worker that a move was to end, and that failed otherwise."""
        self.recovers = False
        """A rank was lost: all others are killed, and start again with what was in memory."""
        self._orphaned: Failure | None = None
        """The job that this companion lends to is gone."""
        self._stopped_by = 0
        self.decide_by: float | None = None
        """When to decide without those that have not ended."""

    @property
    def leaving(self) -> set[int]:
        """Nodes that a move removes and whose launchers have not ended yet."""
        return self.connected - self.staying

    # -- ends of workers and nodes ----------------------------------------------------------------------------

    def worker_ended(self, node: int, end: WorkerEnded) -> None:
        terms = self.terms
        self.running[node].discard(end.local_rank)
        if not end.status or self.phase is Phase.STOPPING:
            return
        if end.status == STOPPED_STATUS and end.why:
            # The worker itself says that all ranks have saved and end.
            self.phase, self._stopped_by = Phase.STOPPING, signal.SIGTERM
            self._tell(self.connected, EndWorkers(terms.graces.stop, terms.graces.stop + terms.graces.term))
            return
        at = end.at - (HEAD_START_S if end.lost else 0.0)
        why = end.why or describe_status(end.status)
        failure = Failure(at, self._first_rank(node) + end.local_rank, end.status, why, end.where)
        if node not in self.staying:
            if end.status != LEFT_STATUS and not end.asked and self.odd is None:
                self.odd = failure
            self._hurry()
        elif not (terms.companion and end.status == LEFT_STATUS):
            # A companion's rank is lost, or memory ran out and the next start takes smaller batches.
            asks = bool(end.why) and end.status == RETRY_STATUS and terms.may_retry
            self._fail(failure, lost=end.lost or asks)

    def node_gone(self, node: int) -> None:
        """The connection to a node's launcher has ended."""
        name, running = self.terms.names[node], self.running[node]
        self.connected.discard(node)
        self.running[node] = set()
        if node not in self.staying:
            self._answer(NodesLeft((name,)))
        elif running and self.phase is not Phase.STOPPING:
            why = f"lost the connection to the launcher of node {name} (node failed or launcher killed)"
            at = self._posix() - HEAD_START_S
            self._fail(Failure(at, self._first_rank(node), 1, why, f"node {name}"), lost=True)

    def parent_gone(self) -> None:
        """The job that this companion lends to has ended."""
        if self._orphaned is None and any(self.running.values()):
            why = "the job that this one is a companion of has ended, or started again"
            self._orphaned = Failure(self._posix(), 0, 1, why, f"node {self.terms.names[0]}")
            self._tell(self.connected, self.terms.graces.after_failure)

    def _first_rank(self, node: int) -> int:
        """The rank of a node's first worker as the agent counts now."""
        return sum(self.terms.workers[other] for other in self.staying if other < node)

    def _fail(self, failure: Failure, *, lost: bool) -> None:
        """End all workers: a rank has failed.

        `lost`: somebody else has ended it. If new ranks can restore the state, all others are killed at once, even
        where ranks that lost their peer failed before anybody knew of the loss.
        """
        self.failures.append(failure)
        if self.recovers:
            return
        # Where rank 0 has ended well, nothing is restored. Node 0 stays in each move: its ranks are the first ones.
        over = not self.running[0] and all(each.rank >= self.terms.workers[0] for each in self.failures)
        if lost and self.terms.may_retry and not over and self._restores():
            self.recovers = True
            self._tell(self.connected, EndWorkers(0.0, 0.0))
        elif self.phase is not Phase.FAILING:
            self._tell(self.connected, self.terms.graces.after_failure)
        if self.phase is not Phase.FAILING:
            self.phase, self.decide_by = Phase.FAILING, self._clock() + self.terms.graces.reports

    def signalled(self, node: int, signalled: Signalled) -> None:
        """A signal asks a node's launcher to end."""
        if signalled.number == signal.SIGTERM and not self._stopped_by:
            self._tell(self.connected - {node}, Stop())
        self.phase, self._stopped_by = Phase.STOPPING, self._stopped_by or signalled.number

    # -- moves ------------------------------------------------------------------------------------------------

    def announced(self, move: AnnounceMove) -> None:
        why = self._objection(move)
        if not why:
            leaving = {node for node in self.staying if self.terms.names[node] in move.leaving}
            self.staying -= leaving
            self.move_id, self._lent, self._hurried = move.move_id, move.lent, False
            if leaving:
                names = tuple(self.terms.names[node] for node in sorted(leaving))
                self.resized = Resized(move.move_id, names)
                self._tell(leaving & self.connected, Leave())
        self._answer(MoveAnswer(move.move_id, why))

    def _objection(self, move: AnnounceMove) -> str:
        if self.phase is not Phase.TRAINING:
            return "the ranks are being ended"
        if move.move_id <= 0:
            return f"expected a move's number from 1, got {move.move_id}"
        if move.move_id == self.resized.move_id:
            return "it is over already"
        if self.terms.names[0] in move.leaving:
            return f"expected {self.terms.names[0]}, where rank 0 is, to stay"
        return ""

    def awaited(self, move: AwaitLeavers) -> None:
        """Rank 0 waits for the nodes that a move removes."""
        if move.move_id == self.move_id:
            self._hurry()

    def _hurry(self) -> None:
        """Give the workers that the newest move removes their time to end.

        The first of them has ended, or rank 0 waits for them. If they end with status 0, the training was over before
        the step of the move: then nobody hurries them.
        """
        if not self._hurried and self.phase is Phase.TRAINING:
            self._hurried, leave = True, self.terms.graces.leave
            self._tell(self.leaving, EndWorkers(leave, 2 * leave))

    # -- the end ----------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Decide how the start ended: when all workers have ended, or when the time for that is over."""
        if self.outcome is not None or self.running[0]:
            return
        if self.phase is Phase.STOPPING:
            self.outcome = Outcome(ended_by=self._stopped_by)
            return
        everybody = not any(self.running[node] for node in self.staying)
        overdue = self.decide_by is not None and self._clock() >= self.decide_by
        if not everybody and not overdue:
            return
        orphaned = [self._orphaned] if self.failures and self._orphaned else []
        first = min([*self.failures, *orphaned], default=None)
        asked = first is not None and (self.recovers or self._asks_for_start(first))
        next_nodes: tuple[int, ...] = ()
        here = self.staying & self.connected
        if asked or (first is not None and self.terms.may_restart):
            # Slurm takes the nodes that leave as soon as the next rank 0 says that they are free.
            if self.leaving and not overdue:
                if self.decide_by is None:
                    self.decide_by = self._clock() + self.terms.graces.gone
                return
            if everybody and (self.recovers or here == self.staying):
                next_nodes = tuple(sorted(here))
        self.outcome = Outcome(first, 0, next_nodes, asked, lost=here != self.staying)

    def _asks_for_start(self, failure: Failure) -> bool:
        """Whether a rank has asked for another start of all, and gets one."""
        # NCCL's watchdog aborts a process where another's node is lost.
        aborted = self._lent and failure.status == 128 + signal.SIGABRT
        asks = failure.status == RETRY_STATUS or aborted
        return bool(asks and (self.terms.may_retry or self.move_id))


def describe_status(status: int) -> str:
    """Say how a process ended, from its shell-like exit status."""
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"exited with status {status}"
    hint = " (out of memory, or someone's kill -9)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
