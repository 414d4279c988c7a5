"""Supervise a node's workers to their end.

The launchers of the job's other nodes take part.

`machine` decides what happens; this module feeds it events and carries out its actions. No Python signal handler is
installed: all signals that matter here are blocked, and one loop takes them with sigtimedwait, so none is lost and none
interrupts anything. SIGIO tells of messages from other launchers and from rank 0, and of the end of a companion's
parent.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from pollux.launcher.channel import Channel
from pollux.launcher.companion_file import Parent
from pollux.launcher.failures import odd_end
from pollux.launcher.launcher_channel import LauncherChannels, free_port
from pollux.launcher.machine import begin, step
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    NodesLeft,
    Refused,
    Start,
    StartDecided,
    Taken,
)
from pollux.launcher.outcome import Failure, Outcome, Resized
from pollux.launcher.state import (
    Action,
    End,
    Event,
    Finish,
    FromNode,
    FromRank0,
    Graces,
    NodeGone,
    Now,
    ParentGone,
    Signalled,
    SignalWorkers,
    StartTerms,
    Tell,
    TellRank0,
    Tick,
    WorkerEnded,
)
from pollux.launcher.workers import Notes, Worker, kill_descendants, kill_forks_of_the_dead, reap
from pollux.ranks.node_memory import NodeMemory

ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
WATCHED = ENDING | {signal.SIGCHLD, signal.SIGIO}
LONGEST_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class LaunchContext:
    """What a start of the workers is part of.

    `where` names this node in messages.
    """

    where: str
    may_restart: bool = False
    may_retry: bool = False
    resized: Resized = field(default_factory=Resized)
    """Of the starts before."""
    parent: Parent | None = None
    """The job whose companion this one is: the ranks that it lends may leave at any time."""
    graces: Graces = field(default_factory=Graces)


class Supervisor:
    """One start of one node's workers."""

    def __init__(
        self,
        workers: Iterable[Worker],
        notes: Notes,
        channels: LauncherChannels,
        context: LaunchContext,
        lines: Sequence[Channel] = (),
        memory: NodeMemory | None = None,
    ) -> None:
        """`lines` lead to the workers."""
        self._workers = {worker.pid: worker for worker in workers}
        self._running = dict(self._workers)
        self._notes, self._channels, self._lines = notes, channels, lines
        self._rank_0 = lines[0] if lines else None
        """To the worker that has spoken as rank 0."""
        self._memory = memory
        self._parent = context.parent
        self._terms = StartTerms(
            channels.node_rank,
            tuple(channels.workers),
            tuple(channels.names),
            context.where,
            context.may_restart,
            context.may_retry,
            companion=context.parent is not None,
            graces=context.graces,
        )
        state = begin(self._terms, context.resized)
        local_ranks = frozenset(worker.local_rank for worker in self._running.values())
        self._state = replace(state, running=local_ranks)
        self._outcome: Outcome | None = None

    @property
    def moved(self) -> bool:
        """Whether rank 0 has announced a move in this start."""
        return self._state.move is not None

    @property
    def oddly_ended(self) -> Failure | None:
        """Find the first worker that a move was to end and that failed otherwise."""
        return odd_end(self._terms, self._state)

    def wait(self) -> Outcome:
        """Wait until this node's workers have ended and the outcome is agreed."""
        taken = None
        while True:
            for event in self._events(None if taken is None else taken.si_signo):
                self._feed(event)
                if self._outcome is not None:
                    if self._outcome != Outcome():
                        kill_descendants()
                    return self._outcome
            due, now = self._state.due, time.monotonic()
            patience = LONGEST_WAIT_S if due is None else min(max(due - now, 0.0), LONGEST_WAIT_S)
            taken = signal.sigtimedwait(WATCHED, patience)

    def _events(self, number: int | None) -> Iterator[Event]:
        """Return the events since the last call, signals first."""
        gone: list[int] = []
        if number == signal.SIGCHLD:
            ended = [(worker, self._end_of(worker)) for worker in reap(self._running)]
            # An earlier message of rank 0, or of another launcher, may explain a worker's end.
            yield from self._heard_from_rank_0()
            gone += yield from self._heard_from_nodes()
            if any(end.status > 128 for _, end in ended):
                kill_forks_of_the_dead(self._running.keys())
            for worker, end in ended:
                yield WorkerEnded(worker.local_rank, end)
        elif number in ENDING:
            assert number is not None
            yield Signalled(number)
        yield from self._heard_from_rank_0()
        gone += yield from self._heard_from_nodes()
        for node in gone:
            yield NodeGone(node)
        if self._parent is not None and self._running and self._parent.gone():
            yield ParentGone()
        yield Tick()

    def _heard_from_nodes(self) -> Generator[Event, None, list[int]]:
        """What the other launchers have said; returns those that are gone."""
        gone: list[int] = []
        for node, message in self._channels.heard():
            # An earlier message may also explain a node's report of its end.
            yield from self._heard_from_rank_0()
            if message is None:
                gone.append(node)
            elif not isinstance(message, AnnounceMove | AwaitLeavers | Taken | Refused | NodesLeft | Start):
                yield FromNode(node, message)
        return gone

    def _heard_from_rank_0(self) -> Iterator[Event]:
        for line in self._lines:
            for message in line.pending():
                if isinstance(message, AnnounceMove | AwaitLeavers):
                    self._rank_0 = line
                    yield FromRank0(message)

    def _end_of(self, worker: Worker) -> End:
        status, note = worker.status or 0, self._notes.read(worker.local_rank)
        if note is None or not status:
            return End(status, worker.ended_at, pid=worker.pid)
        # The status that the worker wanted counts: another rank's end may have killed it while it exited.
        return End(note.status or status, worker.ended_at, note.why, note.at, worker.pid)

    def _feed(self, event: Event) -> None:
        now = Now(time.monotonic(), time.time())
        terms = self._terms
        if terms.hub and self._memory is not None:
            terms = replace(terms, recovers=self._memory.restores)
        self._state, actions = step(terms, self._state, event, now)
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        match action:
            case SignalWorkers(number):
                self._signal_workers(number)
            case Tell(message):
                self._channels.tell(message)
            case TellRank0(message) if self._rank_0 is not None:
                self._rank_0.send(message)
            case Finish(outcome, tell):
                if outcome.again is not None and not outcome.again.port:
                    outcome = replace(outcome, again=replace(outcome.again, port=free_port()))
                if tell:
                    self._channels.tell(StartDecided(outcome.failure, outcome.again))
                self._outcome = outcome

    def _signal_workers(self, number: int) -> None:
        for pid in self._running:
            # Not yet reaped, so the pid is still its own: it cannot have become another process's.
            os.kill(pid, number)
