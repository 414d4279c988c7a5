"""Decide what one node's launcher does next. Pure.

`step` takes the state and an event, and returns the new state and the actions to carry out. It reads no clock, sends
no message and no signal: `supervisor` carries the actions out. A node is in one of these phases:

TRAINING   the workers run
ASKING     a worker ended as in a move, but this node knows of no move; it asks node 0
    LEAVING    a move ends this node's workers; their grace period has begun
    FAILING    a rank failed, here or elsewhere; all workers end
    STOPPING   a signal asks this launcher, or another's, to end; after SIGTERM workers have time to save

When its workers have ended, each launcher reports its first failure to node 0. Node 0 names the earliest one as the
cause, and decides whether all start again. On a node that a move removes, workers may end in any way: that is no
failure.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from pollux.errors import LEFT_STATUS, STOPPED_STATUS
from pollux.launcher.failures import asks_for_start, excused, first_failure, is_loss, node_gone
from pollux.launcher.messages import (
    Alert,
    AnnounceMove,
    AskForMove,
    AwaitLeavers,
    Done,
    LauncherMessage,
    Left,
    MoveNotice,
    NodesLeft,
    RankMessage,
    Refused,
    StartDecided,
    StartGrace,
    Stop,
    Taken,
)
from pollux.launcher.outcome import Again, Failure, Outcome, Resized
from pollux.launcher.state import (
    Action,
    End,
    Event,
    Finish,
    FromNode,
    FromRank0,
    LauncherState,
    NodeGone,
    Now,
    ParentGone,
    Phase,
    Signalled,
    SignalWorkers,
    StartTerms,
    Tell,
    TellRank0,
    WorkerEnded,
)


def begin(terms: StartTerms, resized: Resized) -> LauncherState:
    """The state in which the workers start."""
    nodes = frozenset(range(len(terms.workers)))
    connected = nodes - {0} if terms.hub else frozenset({0})
    first = sum(terms.workers[: terms.node])
    return LauncherState(first, frozenset(range(terms.workers[terms.node])), nodes, connected, resized)


def step(
    terms: StartTerms, state: LauncherState, event: Event, now: Now
) -> tuple[LauncherState, list[Action]]:
    """The new state, and what to do, in order."""
    machine = _Step(terms, state, now)
    machine.take(event)
    machine.end_what_is_due()
    machine.conclude()
    return machine.state, machine.actions


class _Step:
    """One step of the machine."""

    def __init__(self, terms: StartTerms, state: LauncherState, now: Now) -> None:
        self.terms, self.state, self.now = terms, state, now
        self.actions: list[Action] = []

    def take(self, event: Event) -> None:
        match event:
            case WorkerEnded(local_rank, end):
                self._worker_ended(local_rank, end)
            case Signalled(number):
                self._signalled(number)
            case FromRank0(message):
                self._from_rank_0(message)
            case FromNode(node, message):
                self._from_node(node, message)
            case NodeGone(node):
                self._node_gone(node)
            case ParentGone() if self.state.orphaned is None and self.state.running:
                why = "the job that this one is a companion of has ended, or started again"
                orphaned = Failure(self.now.posix, self.state.first_rank, 1, why, self.terms.where)
                self._set(orphaned=orphaned, term_at=self.now.clock + self.terms.graces.sibling)

    def end_what_is_due(self) -> None:
        state, now, grace = self.state, self.now, self.terms.graces.term
        if state.term_at is not None and now.clock >= state.term_at:
            self.actions.append(SignalWorkers(signal.SIGTERM))
            kill_at = now.clock + grace if state.kill_at is None else state.kill_at
            self._set(term_at=None, kill_at=kill_at, ended_from=min(state.ended_from, now.posix))
        if self.state.kill_at is not None and now.clock >= self.state.kill_at:
            self.actions.append(SignalWorkers(signal.SIGKILL))
            self._set(kill_at=now.clock + grace, killed_from=min(state.killed_from, now.posix))

    # -- this node's workers ----------------------------------------------------------------------------------

    def _worker_ended(self, local_rank: int, end: End) -> None:
        state = self.state
        self._set(running=state.running - {local_rank}, ended={**state.ended, local_rank: end})
        if not end.status or state.phase is Phase.STOPPING:
            return
        if end.status == STOPPED_STATUS and end.why is not None:
            # The worker itself says that all ranks have saved and end.
            self._stop(signal.SIGTERM)
            return
        if excused(self.terms, self.state, end.status):
            self._begin_grace()
        elif end.status == LEFT_STATUS and not self.terms.hub:
            # Node 0 answers by an alert, unless it has already sent the move that explains this end.
            if state.phase is Phase.TRAINING:
                self._set(phase=Phase.ASKING)
            self.actions.append(Tell(AskForMove()))
        else:
            self._fail(lost=is_loss(self.terms, state, end))

    def _signalled(self, number: int) -> None:
        if number == signal.SIGTERM and self.state.phase is not Phase.STOPPING:
            self.actions.append(Tell(Stop()))
        self.actions.append(SignalWorkers(number))
        self._stop(number)

    def _stop(self, number: int) -> None:
        state, graces = self.state, self.terms.graces
        kill_at = self.now.clock + (graces.stop if number == signal.SIGTERM else graces.term)
        self._set(
            phase=Phase.STOPPING,
            stopped_by=state.stopped_by or number,
            kill_at=kill_at if state.kill_at is None else min(kill_at, state.kill_at),
        )

    def _fail(self, *, lost: bool = False, tell: bool = True) -> None:
        """End all workers: a rank has failed, here or on another node.

        A node that learns of the failure from another node sends no alert (`tell`): it could reach node 0 in the next
        start. `lost`: somebody else has ended the rank. If new ranks can restore the state, node 0 has all others
        killed at once, even where ranks that lost their peer failed before anybody knew of the loss.
        """
        state, terms = self.state, self.terms
        if state.phase is Phase.STOPPING or state.recovers:
            return
        # Where rank 0 has ended well, nothing is restored. The other launchers wait for node 0's answer all the same.
        over = state.reported and state.reports.get(0) is None
        recovers = lost and terms.hub and terms.recovers and terms.may_retry and not over
        if state.phase is Phase.FAILING and not (recovers or (lost and tell)):
            return
        if state.phase is not Phase.FAILING:
            clock, graces = self.now.clock, terms.graces
            self._set(phase=Phase.FAILING, term_at=clock + graces.sibling, decide_by=clock + graces.reports)
        if recovers:
            self._recover()
        if tell:
            self.actions.append(Tell(Alert(recovers if terms.hub else lost)))

    def _recover(self) -> None:
        """Kill this node's workers: all start again with what is in memory."""
        self._set(recovers=True, term_at=None, kill_at=self.now.clock)

    # -- moves ------------------------------------------------------------------------------------------------

    def _from_rank_0(self, message: RankMessage) -> None:
        ending = self.state.phase in (Phase.FAILING, Phase.STOPPING)
        match message:
            case AnnounceMove():
                move = "the ranks are being ended" if ending else self._understood(message)
                if not self.terms.hub:
                    move = "rank 0 is on another node than at the start"
                if isinstance(move, str):
                    self.actions.append(TellRank0(Refused(message.move_id, move)))
                    return
                self._take_move(move)
                # Last: the other launchers must know of the move before rank 0 goes on.
                self.actions.append(TellRank0(Taken(move.move_id)))
            case AwaitLeavers(move_id) if not ending:
                self._begin_grace(move_id)

    def _understood(self, message: AnnounceMove) -> MoveNotice | str:
        """The move, or what is wrong with it."""
        state, names = self.state, self.terms.names
        if message.move_id <= 0:
            return f"expected a move's number from 1, got {message.move_id}"
        if message.move_id == state.resized.move_id:
            return "it is over already"
        leaving = frozenset(node for node in state.staying if names[node] in message.leaving)
        if 0 in leaving:
            return f"expected {names[0]}, where rank 0 is, to stay"
        return MoveNotice(message.move_id, leaving, bool(message.lent))

    def _take_move(self, move: MoveNotice) -> None:
        """On node 0: rank 0 has announced a move."""
        state = self.state
        self._set(staying=state.staying - move.leaving, leaving=state.leaving | move.leaving)
        if move.leaving:
            names = tuple(self.terms.names[node] for node in sorted(move.leaving))
            self._set(resized=Resized(move.move_id, names))
        self.actions.append(Tell(move))
        self._begin_move(move)

    def _begin_move(self, move: MoveNotice) -> None:
        me, state = self.terms.node, self.state
        self._set(move=move, grace_begun=False)
        if state.phase is Phase.ASKING:
            self._set(phase=Phase.TRAINING)
        if not move.ends(me):
            # The agent renumbers its ranks, and so do messages.
            before = sum(self.terms.workers[node] for node in move.leaving if node < me)
            self._set(first_rank=state.first_rank - before)
        elif any(end.status for end in state.ended.values()):
            # The workers ended before this launcher learned of the move.
            self._begin_grace()

    def _begin_grace(self, move_id: int | None = None) -> None:
        """Begin the grace period of the workers that the newest move removes.

        The first of them has exited, or rank 0 waits for them.

        It does not begin if a worker exits with status 0: then the training was over before the step of the move.
        """
        move, clock, graces = self.state.move, self.now.clock, self.terms.graces
        if move is None or self.state.grace_begun or move_id not in (None, move.move_id):
            return
        self._set(grace_begun=True)
        if move.ends(self.terms.node) and self.state.phase in (Phase.TRAINING, Phase.ASKING):
            term_at, kill_at = clock + graces.leave, clock + 2 * graces.leave
            self._set(phase=Phase.LEAVING, term_at=term_at, kill_at=kill_at)
        self.actions.append(Tell(StartGrace(move.move_id)))

    # -- the other launchers ----------------------------------------------------------------------------------

    def _from_node(self, node: int, message: LauncherMessage) -> None:
        ends = self.state.move is not None and self.state.move.ends(node)
        hub, known = self.terms.hub, range(len(self.terms.workers))
        match message:
            case MoveNotice() if not hub and all(number in known for number in message.leaving):
                self._begin_move(message)
            case StartGrace(move_id):
                self._begin_grace(move_id)
            case AskForMove() if not ends:
                self._fail()
            case Alert(lost) if not (ends and hub):
                self._fail(lost=lost and hub, tell=hub)
                if lost and not hub and self.state.phase is Phase.FAILING:
                    self._recover()
            case Stop() if self.state.phase is not Phase.STOPPING:
                if hub:
                    self.actions.append(Tell(Stop()))
                self.actions.append(SignalWorkers(signal.SIGTERM))
                self._stop(signal.SIGTERM)
            case Done(failure) if hub:
                told = None if ends else failure
                self._set(reports={**self.state.reports, node: told})
                if told is not None:
                    self._fail()
            case StartDecided(failure, again) if not hub:
                if again is None or (self.terms.node in again.nodes and again.nodes[-1] in known):
                    self._set(decided=Outcome(failure, again=again))

    def _node_gone(self, node: int) -> None:
        state = self.state
        self._set(connected=state.connected - {node})
        if state.decided is not None or state.phase is Phase.STOPPING:
            return
        if not self.terms.hub:
            if state.running:
                self._set(lost=node_gone(self.terms, state, 0, self.now.posix))
                self._fail()
        elif node in state.leaving:
            self._set(leaving=state.leaving - {node})
            self.actions.append(TellRank0(NodesLeft((self.terms.names[node],))))
        elif node in state.staying and node not in state.reports:
            failure = node_gone(self.terms, state, node, self.now.posix)
            self._set(reports={**state.reports, node: failure})
            self._fail(lost=True)

    # -- the end ----------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        """Report, decide or finish, once this node's workers have ended."""
        state, terms = self.state, self.terms
        if state.running:
            return
        if state.phase is Phase.STOPPING:
            self.actions.append(Finish(Outcome(ended_by=state.stopped_by)))
            return
        if state.move is not None and terms.node in state.move.leaving:
            self.actions += [Tell(Left()), Finish(Outcome(left=True))]
            return
        if state.phase is not Phase.ASKING or not state.connected:
            self._report()
        if self.state.decided is not None:
            self.actions.append(Finish(self.state.decided))

    def _report(self) -> None:
        terms, mine = self.terms, first_failure(self.terms, self.state)
        if not self.state.reported:
            self._set(reported=True)
            if terms.hub:
                self._set(reports={**self.state.reports, 0: mine})
            else:
                self.actions.append(Tell(Done(mine)))
        if terms.hub:
            self._decide()
        elif self.state.decided is None and (not self.state.connected or self._overdue):
            # Node 0 is gone, and no other node sends an outcome.
            self._set(decided=Outcome(mine))

    def _decide(self) -> None:
        """On node 0: decide how the start ended.

        This happens when all nodes have reported, or when the time for reports is over.
        """
        state = self.state
        everybody, overdue = state.staying <= state.reports.keys(), self._overdue
        if not everybody and not overdue:
            return
        failures = [state.reports[node] for node in state.staying & state.reports.keys()]
        known = [failure for failure in failures if failure is not None]
        first = min(known, key=lambda failure: failure.order, default=None)
        again = None
        asked = first is not None and (state.recovers or asks_for_start(self.terms, state, first))
        if asked or (first is not None and self.terms.may_restart):
            # Slurm takes the nodes that leave as soon as the next rank 0 says that they are free.
            if state.leaving and not overdue:
                if state.decide_by is None:
                    self._set(decide_by=self.now.clock + self.terms.graces.gone)
                return
            here = state.staying & {0, *state.connected}
            if everybody and (state.recovers or here == state.staying):
                again = Again(tuple(sorted(here)), state.resized, asked, lost=here != state.staying)
        self.actions.append(Finish(Outcome(first, again=again), tell=True))

    @property
    def _overdue(self) -> bool:
        return self.state.decide_by is not None and self.now.clock >= self.state.decide_by

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
