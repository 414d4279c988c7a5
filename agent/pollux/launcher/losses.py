"""The launcher's part where ranks are lost and the others go on.

Rank 0 says once that the ranks can go on without one that is killed. A launcher then waits for some time, instead of
ending all of them, until rank 0 says that they have gone on. The first failure is kept for where they do not.
"""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import replace

from pollux.errors import LEFT_STATUS
from pollux.launcher.messages import Mended
from pollux.launcher.outcome import Failure
from pollux.launcher.state import Action, End, LauncherState, Now, Phase, StartTerms, Tell

SUDDEN = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
"""Deaths that never answer another rank's failure, as an exception or an abort may."""


class Losses(ABC):
    """A step of the launcher's machine, as far as lost ranks go."""

    def __init__(self, terms: StartTerms, state: LauncherState, now: Now) -> None:
        self.terms, self.state, self.now = terms, state, now
        self.actions: list[Action] = []

    def without(self, local_rank: int, end: End) -> bool:
        """Whether the others may go on without this worker."""
        state = self.state
        if not state.mends or state.phase is not Phase.TRAINING or (self.terms.hub and local_rank == 0):
            return False
        killed = end.why is None and end.status - 128 in SUDDEN | {signal.SIGABRT}
        beside = end.status == LEFT_STATUS  # another rank of its node was lost
        if not killed and not beside:
            return False
        self._set(dropped=state.dropped | {local_rank})
        self.await_mending()
        return True

    def await_mending(self) -> None:
        if self.state.mend_by is None:
            self._set(mend_by=self.now.clock + self.terms.graces.mend)

    def mended(self, names: Collection[str]) -> None:
        """The ranks have gone on, on these nodes."""
        state = self.state
        gone = frozenset(node for node in state.staying if self.terms.names[node] not in names)
        self._set(mend_by=None, silent=frozenset())
        if self.terms.hub:
            self._set(staying=state.staying - gone, leaving=state.leaving | (gone - state.silent))
            self.actions.append(Tell(Mended(tuple(names))))

    def not_mended(self) -> None:
        """The other ranks have not gone on: all end, and this is why."""
        state = self.state
        why = "the launcher of this node has gone without a word (node failure, or killed)"
        for node in state.silent:
            failure = Failure(self.now.posix, self._rank_of(node), 1, why, f"node {node} of the step")
            self._set(reports={**self.state.reports, node: failure})
        self._set(mend_by=None, dropped=frozenset(), silent=frozenset())
        self._fail()

    @abstractmethod
    def _fail(self, *, tell: bool = True) -> None:
        """A rank has failed: the others cannot go on without it."""

    def _rank_of(self, node: int) -> int:
        """The rank of a node's first worker as the agent counts now."""
        return sum(self.terms.workers[other] for other in self.state.staying if other < node)

    def _set(self, **changes: object) -> None:
        self.state = replace(self.state, **changes)  # type: ignore[arg-type]
