"""Supervise one start of the workers: on node 0 those of the whole job, on another node its own.

No Python signal handler is installed: all signals that matter here are blocked, and one loop takes them with
sigtimedwait, so none is lost and none interrupts anything. SIGIO tells of messages, and of the end of a companion's
parent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Set

from pollux.launcher.machine import Graces, Outcome, StartMachine, StartTerms
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    Channel,
    EndWorkers,
    Leave,
    Message,
    Order,
    Over,
    Signalled,
    Start,
    Stop,
    WorkerEnded,
)
from pollux.launcher.workers import ENDING, WATCHED, NodeWorkers, kill_descendants

LONGEST_WAIT_S = 60.0


def watch(due: Callable[[], float]) -> Iterator[int]:
    """Yield 0, then the number of each watched signal, or 0 when the time `due` has come."""
    number = 0
    while True:
        yield number
        patience = min(max(due() - time.monotonic(), 0.0), LONGEST_WAIT_S)
        taken = signal.sigtimedwait(WATCHED, patience)
        number = 0 if taken is None else taken.si_signo


class Supervisor:
    """Node 0's: tells `machine` what happens, and carries out what it decides."""

    def __init__(
        self,
        terms: StartTerms,
        workers: NodeWorkers,
        channels: Mapping[int, Channel],
        rank_0: Channel | None = None,
        parent: Channel | None = None,
        restores: Callable[[], bool] = lambda: False,
    ) -> None:
        """`channels` lead to the other launchers, by node, and `rank_0` to this node's first worker.

        `parent` leads to rank 0 of the job whose companion this one is.
        """
        answer = (lambda _: None) if rank_0 is None else rank_0.send
        self.machine = StartMachine(terms, self._tell, answer, restores)
        self._workers, self._channels, self._rank_0, self._parent = workers, channels, rank_0, parent

    def wait(self) -> Outcome:
        """Wait until all workers have ended, and return how."""
        machine = self.machine
        for number in watch(self._due):
            for _ in self._events(number):
                machine.conclude()
                if machine.outcome is not None:
                    if machine.outcome.failure is not None or machine.outcome.ended_by:
                        kill_descendants()
                    return machine.outcome
        raise AssertionError

    def _due(self) -> float:
        decide_by = self.machine.decide_by
        return self._workers.due if decide_by is None else min(self._workers.due, decide_by)

    def _events(self, number: int) -> Iterator[None]:
        """Tell the machine what has happened since the last call, one event at a time."""
        machine, ended = self.machine, self._workers.reap()
        # An announcement came before the worker ended that it explains.
        for message in () if self._rank_0 is None else self._rank_0.pending():
            match message:
                case AnnounceMove():
                    machine.announced(message)
                case AwaitLeavers():
                    machine.awaited(message)
            yield
        for node, channel in self._channels.items():
            for message in channel.pending():
                match message:
                    case WorkerEnded():
                        machine.worker_ended(node, message)
                    case Signalled():
                        machine.signalled(node, message)
                yield
        for end in ended:
            machine.worker_ended(0, end)
            yield
        if number in ENDING:
            self._workers.stop(number, machine.terms.graces.after(number))
            machine.signalled(0, Signalled(number))
            yield
        for node in sorted(machine.connected & self._channels.keys()):
            if not self._channels[node].open:
                machine.node_gone(node)
                yield
        # Only the end of this connection means something.
        if self._parent is not None and self._parent.receive(0.0) is None and not self._parent.open:
            machine.parent_gone()
        self._workers.end_what_is_due()
        yield

    def _tell(self, nodes: Set[int], order: Order) -> None:
        for node in sorted(nodes):
            if node:
                self._channels[node].send(order)
            else:
                obey(self._workers, order, self.machine.terms.graces)


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
        self._workers = NodeWorkers(1, "", graces.term)
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
