"""The launcher's part where ranks are lost and the others go on.

Rank 0 says once that the ranks can go on without one that is killed. A launcher then does not end all of them at a
loss. It waits until rank 0 says that they have gone on, and without which ranks. Nodes without ranks then leave the
job, as in a move that shrinks it. Where the others do not go on, the lost rank is the failure that ends them.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from dataclasses import replace

from pollux.errors import LEFT_STATUS
from pollux.launcher.failures import SUDDEN, node_gone
from pollux.launcher.messages import CanMend, Emptied, Mended, MoveNotice
from pollux.launcher.state import Action, End, LauncherState, Now, Phase, SignalWorkers, StartTerms, Tell


class Losses(ABC):
    """A step of the launcher's machine, as far as lost ranks go."""

    def __init__(self, terms: StartTerms, state: LauncherState, now: Now) -> None:
        self.terms, self.state, self.now = terms, state, now
        self.actions: list[Action] = []

    def may_go_on_without(self, local_rank: int, end: End) -> bool:
        """Whether the others may go on without this worker; wait for them."""
        state = self.state
        if local_rank in state.dropped:
            return True
        if not state.mends or state.phase is not Phase.TRAINING:
            return False
        killed = end.why is None and end.status - 128 in SUDDEN | {signal.SIGABRT}
        beside = end.status == LEFT_STATUS  # another rank of its node was lost
        if killed or beside:
            self._set(missing=state.missing | {local_rank})
            self._await_mending()
        return killed or beside

    def may_go_on_without_node(self, node: int) -> bool:
        """On node 0: as `may_go_on_without`, where another launcher is gone."""
        state = self.state
        if (
            not state.mends
            or state.phase is not Phase.TRAINING
            or node not in state.staying - state.reports.keys()
        ):
            return False
        self._set(silent=state.silent | {node})
        self._await_mending()
        return True

    def can_mend(self, able: bool) -> None:
        """Whether the ranks go on without a lost one, from now on."""
        self._set(mends=able)
        if not able and self.state.mend_by is not None:
            self._fail()

    def _await_mending(self) -> None:
        if self.state.mend_by is None:
            self._set(mend_by=self.now.clock + self.terms.graces.mend)

    def mended(self, message: Mended) -> None:
        """On node 0: the ranks have gone on."""
        state = self.state
        gone = frozenset(
            node for node in state.staying if node and self.terms.names[node] not in message.names
        )
        # Node 0's launcher stays to the end, also without workers.
        here = self.terms.names[0] in message.names
        stopped = state.running & set(message.without) if here else state.running
        if stopped:  # ranks that hang, or that come too late
            self.actions.append(SignalWorkers(signal.SIGKILL, stopped))
        self._set(
            mend_by=None,
            missing=frozenset(),
            dropped=state.dropped | state.missing | stopped,
            silent=frozenset(),
            emptied=frozenset(),
            staying=state.staying - gone,
            leaving=state.leaving | (gone - state.silent),
        )
        if gone:
            move = MoveNotice(0, False, gone, message.lent)
            self.actions.append(Tell(move))
            self._begin_move(move)
            self._begin_grace()

    def waits_for_mending(self) -> bool:
        """Whether this node, without workers, waits for what the others' do."""
        state = self.state
        if state.mend_by is None or not self.terms.hub:
            return state.mend_by is not None
        return bool(state.staying - {0} - state.silent - state.emptied - state.reports.keys())

    def of_a_loss(self, node: int, message: CanMend | Mended | Emptied) -> None:
        """What rank 0, on whichever node it is by now, or another launcher says."""
        if self.state.phase in (Phase.FAILING, Phase.STOPPING):
            return
        hub, own = self.terms.hub, node == self.terms.node
        if isinstance(message, CanMend):
            if hub or own:
                self.actions.append(Tell(message))
            self.can_mend(message.able)
        elif not hub and own:
            self.actions.append(Tell(message))
        elif hub and isinstance(message, Mended):
            self.mended(message)
        elif hub:
            self._set(emptied=self.state.emptied | {node})

    def give_up_lost(self) -> None:
        """The others do not go on: the lost ranks are failures."""
        state = self.state
        lost = {node: node_gone(self.terms, state, node, self.now.posix) for node in state.silent}
        self._set(mend_by=None, missing=frozenset(), silent=frozenset(), reports={**state.reports, **lost})

    @abstractmethod
    def _fail(self, *, tell: bool = True) -> None:
        """A rank has failed: the others cannot go on without it."""

    @abstractmethod
    def _begin_move(self, move: MoveNotice) -> None:
        """A move begins, that may end this node's workers."""

    @abstractmethod
    def _begin_grace(self, move_id: int | None = None) -> None:
        """Begin the grace period of the workers that the newest move removes."""

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
