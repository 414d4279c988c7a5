"""Keep the workers running when ranks are lost and the others go on.

Rank 0 says beforehand whether the ranks can go on without a rank that is killed. If they can, a launcher does not end
the other workers at a loss. It waits until rank 0 says that the ranks have gone on, and which ranks are missing. Nodes
without ranks then leave the job, as in a move that shrinks it. If the ranks do not go on, the loss counts as a failure,
which ends all workers.

Pure functions of a launcher's state: `machine` takes over the states that they return.
"""

from __future__ import annotations

import signal
from dataclasses import replace

from pollux.errors import LEFT_STATUS
from pollux.launcher.failures import SUDDEN, node_gone
from pollux.launcher.messages import Mended, MoveNotice
from pollux.launcher.state import End, LauncherState, Now, Phase, StartTerms


def without_worker(
    terms: StartTerms, state: LauncherState, local_rank: int, end: End, now: Now
) -> LauncherState | None:
    """Return the state in which the others may go on without this worker.

    None where they cannot.
    """
    if local_rank in state.dropped:
        return state
    if not state.mends or state.phase is not Phase.TRAINING:
        return None
    killed = end.why is None and end.status - 128 in SUDDEN | {signal.SIGABRT}
    beside = end.status == LEFT_STATUS  # another rank of its node was lost
    if not killed and not beside:
        return None
    return _waiting(terms, replace(state, missing=state.missing | {local_rank}), now)


def without_node(terms: StartTerms, state: LauncherState, node: int, now: Now) -> LauncherState | None:
    """On node 0: as `without_worker`, where another launcher is gone."""
    here = node in state.staying - state.reports.keys()
    if not state.mends or state.phase is not Phase.TRAINING or not here:
        return None
    return _waiting(terms, replace(state, silent=state.silent | {node}), now)


def _waiting(terms: StartTerms, state: LauncherState, now: Now) -> LauncherState:
    return state if state.mend_by is not None else replace(state, mend_by=now.clock + terms.graces.mend)


def mended(
    terms: StartTerms, state: LauncherState, message: Mended
) -> tuple[LauncherState, frozenset[int], MoveNotice | None]:
    """On node 0: note that the ranks have gone on.

    Return the state, the workers to kill (by local rank), and the move that removes the nodes without ranks.
    """
    gone = frozenset(node for node in state.staying if node and terms.names[node] not in message.names)
    # Node 0's launcher stays to the end, also without workers.
    here = terms.names[0] in message.names
    # Ranks that hang, or that come too late.
    stopped = state.running & set(message.without) if here else state.running
    gone_on = replace(
        state,
        mend_by=None,
        missing=frozenset(),
        dropped=state.dropped | state.missing | stopped,
        silent=frozenset(),
        emptied=frozenset(),
        staying=state.staying - gone,
        leaving=state.leaving | (gone - state.silent),
    )
    return gone_on, stopped, MoveNotice(0, gone, message.lent) if gone else None


def waits(terms: StartTerms, state: LauncherState) -> bool:
    """Whether this node has no workers and waits for the other ranks."""
    if state.mend_by is None or not terms.hub:
        return state.mend_by is not None
    return bool(state.staying - {0} - state.silent - state.emptied - state.reports.keys())


def given_up(terms: StartTerms, state: LauncherState, now: Now) -> LauncherState:
    """Count the lost ranks as failures: the other ranks do not go on."""
    lost = {node: node_gone(terms, state, node, now.posix) for node in state.silent}
    return replace(
        state, mend_by=None, missing=frozenset(), silent=frozenset(), reports={**state.reports, **lost}
    )
