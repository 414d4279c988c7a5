"""Decide what node 0's launcher does next. Pure.

`step` takes the state and an event, and returns the new state and the actions to carry out. It reads no clock, sends no
message and no signal: `supervisor` carries the actions out. A start of the workers is in one of three phases:

TRAINING   the workers run
FAILING    a rank has failed: all workers end
STOPPING   a signal asks the job to end; workers have time to save

When all workers have ended, the earliest failure is named as the cause, and all start again if that is allowed, or if
new ranks can restore what a lost rank has left in memory. On a node that a move removes, workers may end in any way:
that is no failure.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from pollux.errors import LEFT_STATUS, RETRY_STATUS, STOPPED_STATUS
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Leave,
    NodesLeft,
    Order,
    Refused,
    Signalled,
    Stop,
    Taken,
    WorkerEnded,
)
from pollux.launcher.state import (
    Action,
    Again,
    Event,
    Failure,
    Finish,
    FromNode,
    FromRank0,
    NodeGone,
    Now,
    Outcome,
    ParentGone,
    Phase,
    Resized,
    StartTerms,
    State,
    Tell,
    TellRank0,
)

HEAD_START_S = 1.0
"""A death by a signal counts as so much earlier than seen: other ranks may raise before this process learns of it."""


def step(terms: StartTerms, state: State, event: Event, now: Now) -> tuple[State, list[Action]]:
    """The new state, and what to do, in order."""
    machine = _Step(terms, state, now)
    machine.take(event)
    machine.conclude()
    return machine.state, machine.actions


class _Step:
    """One step of the machine."""

    def __init__(self, terms: StartTerms, state: State, now: Now) -> None:
        self.terms, self.state, self.now = terms, state, now
        self.actions: list[Action] = []

    def take(self, event: Event) -> None:
        match event:
            case FromNode(node, WorkerEnded() as end):
                self._worker_ended(node, end)
            case FromNode(node, Signalled(number)):
                self._stop(node, number)
            case FromRank0(AnnounceMove() as move):
                self._announced(move)
            case FromRank0(AwaitLeavers(move_id)) if move_id == self.state.move_id:
                self._hurry()
            case NodeGone(node):
                self._node_gone(node)
            case ParentGone() if self.state.orphaned is None and any(self.state.running.values()):
                why = "the job that this one is a companion of has ended, or started again"
                self._set(orphaned=Failure(self.now.posix, 0, 1, why, f"node {self.terms.names[0]}"))
                self._tell(self.terms.graces.after_failure)

    # -- ends of workers and nodes ----------------------------------------------------------------------------

    def _worker_ended(self, node: int, end: WorkerEnded) -> None:
        state, terms = self.state, self.terms
        self._set(running={**state.running, node: state.running[node] - {end.local_rank}})
        if not end.status or state.phase is Phase.STOPPING:
            return
        if end.status == STOPPED_STATUS and end.why:
            # The worker itself says that all ranks have saved and end.
            self._set(phase=Phase.STOPPING, stopped_by=signal.SIGTERM)
            self._tell(EndWorkers(terms.graces.stop, terms.graces.stop + terms.graces.term))
            return
        at = end.at - (HEAD_START_S if end.lost else 0.0)
        why = end.why or describe_status(end.status)
        failure = Failure(at, self._first_rank(node) + end.local_rank, end.status, why, end.where)
        if node not in state.staying:
            if end.status != LEFT_STATUS and not end.asked and state.odd is None:
                self._set(odd=failure)
            self._hurry()
        elif not (terms.companion and end.status == LEFT_STATUS):
            # A companion's rank is lost, or memory ran out and the next start takes smaller batches.
            asks = bool(end.why) and end.status == RETRY_STATUS and terms.may_retry
            self._fail(node, failure, lost=end.lost or asks)

    def _node_gone(self, node: int) -> None:
        state, name = self.state, self.terms.names[node]
        running = state.running[node]
        self._set(connected=state.connected - {node}, running={**state.running, node: frozenset()})
        if node not in state.staying:
            self.actions.append(TellRank0(NodesLeft((name,))))
        elif running and state.phase is not Phase.STOPPING:
            why = f"lost the connection to the launcher of node {name} (node failed or launcher killed)"
            at = self.now.posix - HEAD_START_S
            self._fail(node, Failure(at, self._first_rank(node), 1, why, f"node {name}"), lost=True)

    def _first_rank(self, node: int) -> int:
        """The rank of a node's first worker as the agent counts now."""
        return sum(self.terms.workers[other] for other in self.state.staying if other < node)

    def _fail(self, node: int, failure: Failure, *, lost: bool) -> None:
        """End all workers: a rank has failed.

        `lost`: somebody else has ended it. If new ranks can restore the state, all others are killed at once, even
        where ranks that lost their peer failed before anybody knew of the loss.
        """
        state, terms = self.state, self.terms
        self._set(failures=(*state.failures, failure), failed=state.failed | {node})
        if state.recovers:
            return
        # Where rank 0 has ended well, nothing is restored.
        over = not state.running[0] and 0 not in self.state.failed
        if lost and terms.recovers and terms.may_retry and not over:
            self._set(recovers=True)
            self._tell(EndWorkers(0.0, 0.0))
        elif state.phase is not Phase.FAILING:
            self._tell(terms.graces.after_failure)
        if state.phase is not Phase.FAILING:
            self._set(phase=Phase.FAILING, decide_by=self.now.clock + terms.graces.reports)

    def _stop(self, node: int, number: int) -> None:
        if number == signal.SIGTERM and not self.state.stopped_by:
            self._tell(Stop(), but=node)
        self._set(phase=Phase.STOPPING, stopped_by=self.state.stopped_by or number)

    # -- moves ------------------------------------------------------------------------------------------------

    def _announced(self, move: AnnounceMove) -> None:
        why, state = self._objection(move), self.state
        if why is not None:
            self.actions.append(TellRank0(Refused(move.move_id, why)))
            return
        leaving = frozenset(node for node in state.staying if self.terms.names[node] in move.leaving)
        self._set(staying=state.staying - leaving, move_id=move.move_id, lent=move.lent, hurried=False)
        if leaving:
            names = tuple(self.terms.names[node] for node in sorted(leaving))
            self._set(resized=Resized(move.move_id, names))
            self.actions.append(Tell(leaving & state.connected, Leave()))
        self.actions.append(TellRank0(Taken(move.move_id)))

    def _objection(self, move: AnnounceMove) -> str | None:
        if self.state.phase is not Phase.TRAINING:
            return "the ranks are being ended"
        if move.move_id <= 0:
            return f"expected a move's number from 1, got {move.move_id}"
        if move.move_id == self.state.resized.move_id:
            return "it is over already"
        if self.terms.names[0] in move.leaving:
            return f"expected {self.terms.names[0]}, where rank 0 is, to stay"
        return None

    def _hurry(self) -> None:
        """Give the workers that the newest move removes their time to end.

        The first of them has ended, or rank 0 waits for them. If they end with status 0, the training was over before
        the step of the move: then nobody hurries them.
        """
        if not self.state.hurried and self.state.phase is Phase.TRAINING:
            self._set(hurried=True)
            leave = self.terms.graces.leave
            self.actions.append(Tell(self.state.leaving, EndWorkers(leave, 2 * leave)))

    # -- the end ----------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Decide how the start ended: when all workers have ended, or when the time for that is over."""
        state, terms = self.state, self.terms
        if state.running[0]:
            return
        if state.phase is Phase.STOPPING:
            self.actions.append(Finish(Outcome(ended_by=state.stopped_by)))
            return
        everybody = not any(state.running[node] for node in state.staying)
        overdue = state.decide_by is not None and self.now.clock >= state.decide_by
        if not everybody and not overdue:
            return
        failures = [*state.failures, *((state.orphaned,) if state.failures and state.orphaned else ())]
        first, again = min(failures, key=lambda failure: failure.order, default=None), None
        asked = first is not None and (state.recovers or self._asks_for_start(first))
        if asked or (first is not None and terms.may_restart):
            # Slurm takes the nodes that leave as soon as the next rank 0 says that they are free.
            if state.leaving and not overdue:
                if state.decide_by is None:
                    self._set(decide_by=self.now.clock + terms.graces.gone)
                return
            here = state.staying & state.connected
            if everybody and (state.recovers or here == state.staying):
                again = Again(tuple(sorted(here)), state.resized, asked, lost=here != state.staying)
        self.actions.append(Finish(Outcome(first, again=again)))

    def _asks_for_start(self, failure: Failure) -> bool:
        """Whether a rank has asked for another start of all, and gets one."""
        # NCCL's watchdog aborts a process where another's node is lost.
        aborted = self.state.lent and failure.status == 128 + signal.SIGABRT
        asks = failure.status == RETRY_STATUS or aborted
        return bool(asks and (self.terms.may_retry or self.state.move_id))

    def _tell(self, order: Order, but: int = -1) -> None:
        self.actions.append(Tell(self.state.connected - {but}, order))

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]


def describe_status(status: int) -> str:
    """Say how a process ended, from its shell-like exit status."""
    try:
        name = signal.Signals(status - 128).name
    except ValueError:
        return f"exited with status {status}"
    hint = " (out of memory, or someone's kill -9)" if name == "SIGKILL" else ""
    return f"was ended by {name}{hint}"
