"""Supervise one start of the workers: on node 0 those of the whole job, on another node its own.

No Python signal handler is installed: all signals that matter here are blocked, and one loop takes them with
sigtimedwait, so none is lost and none interrupts anything. SIGIO tells of messages, and of the end of a companion's
parent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pollux.launcher.channel import Channel
from pollux.launcher.companion_file import Parent
from pollux.launcher.machine import step
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Leave,
    Message,
    Over,
    Signalled,
    Start,
    Stop,
    WorkerEnded,
)
from pollux.launcher.state import (
    Event,
    Failure,
    Finish,
    FromNode,
    FromRank0,
    Graces,
    NodeGone,
    Now,
    Outcome,
    ParentGone,
    Resized,
    StartTerms,
    Tell,
    TellRank0,
    Tick,
    begin,
)
from pollux.launcher.workers import NodeWorkers, Notes, kill_descendants
from pollux.ranks.node_memory import NodeMemory

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
WATCHED = ENDING | {signal.SIGCHLD, signal.SIGIO}
LONGEST_WAIT_S = 60.0


def watch(due: Callable[[], float]) -> Iterator[int]:
    """Yield 0, then the number of each watched signal, or 0 when the time `due` has come."""
    number = 0
    while True:
        yield number
        patience = min(max(due() - time.monotonic(), 0.0), LONGEST_WAIT_S)
        taken = signal.sigtimedwait(WATCHED, patience)
        number = 0 if taken is None else taken.si_signo


@dataclass
class Supervisor:
    """Node 0's: carries out what `machine` decides."""

    terms: StartTerms
    resized: Resized
    """Of the starts before."""
    workers: NodeWorkers
    channels: Mapping[int, Channel]
    """To the other launchers, by node."""
    rank_0: Channel | None = None
    """To this node's first worker."""
    parent: Parent | None = None
    """The job whose companion this one is: the ranks that it lends may leave at any time."""
    memory: NodeMemory | None = None

    def __post_init__(self) -> None:
        self._state = begin(self.terms, self.resized)
        self._outcome: Outcome | None = None
        self._lost: set[int] = set()

    @property
    def moved(self) -> bool:
        """Whether rank 0 has announced a move in this start."""
        return self._state.move_id > 0

    @property
    def odd(self) -> Failure | None:
        """The first worker that a move was to end, and that failed otherwise."""
        return self._state.odd

    def wait(self) -> Outcome:
        """Wait until all workers have ended, and return how."""
        for number in watch(self._due):
            for event in self._events(number):
                self._feed(event)
                if self._outcome is not None:
                    if self._outcome != Outcome():
                        kill_descendants()
                    return self._outcome
        raise AssertionError

    def _due(self) -> float:
        decide_by = self._state.decide_by
        return self.workers.due if decide_by is None else min(self.workers.due, decide_by)

    def _events(self, number: int) -> Iterator[Event]:
        """Return the events since the last call."""
        ended = self.workers.reap()
        # An announcement came before the worker ended that it explains.
        for message in () if self.rank_0 is None else self.rank_0.pending():
            if isinstance(message, AnnounceMove | AwaitLeavers):
                yield FromRank0(message)
        for node, channel in self.channels.items():
            for message in channel.pending():
                if isinstance(message, WorkerEnded | Signalled):
                    yield FromNode(node, message)
        for end in ended:
            yield FromNode(0, end)
        if number in ENDING:
            self.workers.stop(number, self.terms.graces.after(number))
            yield FromNode(0, Signalled(number))
        for node, channel in self.channels.items():
            if not channel.open and node not in self._lost:
                self._lost.add(node)
                yield NodeGone(node)
        if self.parent is not None and self.parent.gone():
            yield ParentGone()
        self.workers.end_what_is_due()
        yield Tick()

    def _feed(self, event: Event) -> None:
        terms = self.terms
        if self.memory is not None:
            terms = replace(terms, recovers=self.memory.restores)
        self._state, actions = step(terms, self._state, event, Now(time.monotonic(), time.time()))
        for action in actions:
            match action:
                case Tell(nodes, order):
                    for node in sorted(nodes):
                        if node:
                            self.channels[node].send(order)
                        else:
                            obey(self.workers, order, terms.graces)
                case TellRank0(message) if self.rank_0 is not None:
                    self.rank_0.send(message)
                case Finish(outcome):
                    self._outcome = outcome


def obey(workers: NodeWorkers, order: Message, graces: Graces) -> None:
    """Carry out an order of node 0 about this node's workers."""
    match order:
        case EndWorkers(term_after, kill_after):
            workers.end(term_after, kill_after)
        case Stop() if not workers.stopped_by:
            workers.stop(signal.SIGTERM, graces.stop)


class Follower:
    """Another node's: does what node 0 orders, through all starts."""

    def __init__(
        self, hub: Channel, start: Callable[[Start], NodeWorkers], graces: Graces, say: Callable[[str], None]
    ) -> None:
        """`start` forks the workers of a start. `say` writes a line into the job's output."""
        self._hub, self._start, self._graces, self._say = hub, start, graces, say
        self._workers = NodeWorkers({}, Notes(1), "", graces.term)
        self._leaves = self._alone = False

    def run(self) -> int:
        """Return the launcher's exit status when all starts are over."""
        for number in watch(lambda: self._workers.due):
            if number in ENDING:
                if number == signal.SIGTERM:
                    self._hub.send(Signalled(number))
                self._workers.stop(number, self._graces.after(number))
            for end in self._workers.reap():
                self._hub.send(end)
            status = self._followed()
            if status is None:
                self._workers.end_what_is_due()
                status = self._status
            if status is not None:
                if status:
                    kill_descendants()
                return status
        raise AssertionError

    def _followed(self) -> int | None:
        """Carry out the orders that have come; return the exit status that they bring."""
        for order in self._hub.pending():
            match order:
                case Start():
                    kill_descendants()
                    self._workers = self._start(order)
                case Leave():
                    self._leaves = True
                case Over(status):
                    return status
                case _:
                    obey(self._workers, order, self._graces)
        if not (self._hub.open or self._alone):
            self._alone = True
            if not (self._leaves or self._workers.stopped_by):
                self._say("lost the connection to the launcher of node 0 (node failed or launcher killed)")
                obey(self._workers, self._graces.after_failure, self._graces)
        return None

    @property
    def _status(self) -> int | None:
        if self._workers.running:
            return None
        if self._workers.stopped_by:
            return 128 + self._workers.stopped_by
        return 0 if self._leaves else 1 if self._alone else None
