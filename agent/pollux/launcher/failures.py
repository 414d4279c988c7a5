"""Decide which ends of workers are failures, and which came first.

Pure functions of a launcher's state. A worker that a move removes may end in any way.
"""

from __future__ import annotations

import signal

from pollux.errors import LEFT_STATUS, RETRY_STATUS
from pollux.launcher.outcome import Failure, describe_status
from pollux.launcher.state import End, LauncherState, StartTerms

SUDDEN = {signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL}
"""Signals whose deaths are never a reaction to another rank's failure, as an exception or an abort may be."""
HEAD_START_S = 1.0
"""Seconds by which a sudden death counts as earlier than seen: the others raise before this process gets the signal."""


def excused(terms: StartTerms, state: LauncherState, status: int) -> bool:
    """Whether a worker of this node may end so."""
    if state.move is not None and state.move.ends(terms.node):
        return True
    return terms.companion and status == LEFT_STATUS


def first_failure(terms: StartTerms, state: LauncherState) -> Failure | None:
    """This node's first failure."""
    failures = [state.lost] if state.lost is not None else []
    failures += [
        _of_worker(terms, state, local_rank)
        for local_rank, end in state.ended.items()
        if end.status and not excused(terms, state, end.status)
    ]
    if failures and state.orphaned is not None:
        failures.append(state.orphaned)
    return min(failures, key=lambda failure: failure.order, default=None)


def odd_end(terms: StartTerms, state: LauncherState) -> Failure | None:
    """Find the first removed worker whose end the move does not explain."""
    if state.move is None or not state.move.ends(terms.node):
        return None
    odd = [
        _of_worker(terms, state, local_rank)
        for local_rank, end in state.ended.items()
        if end.status and end.status != LEFT_STATUS and end.at < state.ended_from
    ]
    return min(odd, key=lambda failure: failure.order, default=None)


def node_gone(terms: StartTerms, state: LauncherState, node: int, at: float) -> Failure:
    """The connection to a node's launcher has ended at an unexpected time."""
    why = f"lost the connection to the launcher of node {node} (node failed or launcher killed)"
    at -= HEAD_START_S
    return Failure(at, _rank_of(terms, state, node), 1, why, f"node {node} of the step")


def is_loss(terms: StartTerms, state: LauncherState, end: End) -> bool:
    """Whether somebody else has ended this worker: the script itself has not failed."""
    if end.why is None:
        return end.status - 128 in SUDDEN and end.at < state.killed_from
    # A companion's rank is lost, or memory ran out and the next start takes smaller batches.
    return end.status == RETRY_STATUS and (terms.may_retry or not terms.hub)


def asks_for_start(terms: StartTerms, state: LauncherState, failure: Failure) -> bool:
    """Whether a rank has asked for another start of all, and gets one."""
    move = state.move
    # NCCL's watchdog aborts a process where another's node is lost.
    aborted = move is not None and move.lent and failure.status == 128 + signal.SIGABRT
    return (failure.status == RETRY_STATUS or aborted) and (terms.may_retry or move is not None)


def _rank_of(terms: StartTerms, state: LauncherState, node: int) -> int:
    """The rank of a node's first worker as the agent counts now."""
    return sum(terms.workers[other] for other in state.staying if other < node)


def _of_worker(terms: StartTerms, state: LauncherState, local_rank: int) -> Failure:
    """A worker's end as a failure."""
    end = state.ended[local_rank]
    if end.why is not None:
        at, why = end.said_at, end.why
    else:
        sudden = end.status - 128 in SUDDEN and end.at < state.killed_from
        at, why = end.at - (HEAD_START_S if sudden else 0.0), describe_status(end.status)
    rank = state.first_rank + local_rank
    return Failure(at, rank, end.status, why, f"pid {end.pid}, {terms.where}")
