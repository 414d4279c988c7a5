"""Starts of three nodes, and steps of their launchers' state machine."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pollux.launcher.machine import begin, step
from pollux.launcher.messages import (
    MoveNotice,
)
from pollux.launcher.outcome import Failure, Resized
from pollux.launcher.state import (
    Action,
    End,
    Event,
    Finish,
    Graces,
    LauncherState,
    Now,
    Phase,
    SignalWorkers,
    StartTerms,
    WorkerEnded,
)

GRACES = Graces()
HUB = StartTerms(0, (2, 2, 2), ("n0", "n1", "n2"), "n0")
NODE = replace(HUB, node=1, where="n1")
NOW = Now(1000.0, 5000.0)
TERM, KILL = SignalWorkers(signal.SIGTERM), SignalWorkers(signal.SIGKILL)
SHRINK = MoveNotice(7, frozenset({2}))
"""Removes node 2."""
MINE = MoveNotice(7, frozenset({1}))
FAILURE = Failure(4999.0, 4, 3, "ValueError", "pid 9, n2")


def at(seconds: float) -> Now:
    return Now(NOW.clock + seconds, NOW.posix + seconds)


def end(status: int, **more: Any) -> End:
    return End(status, NOW.posix, pid=11, **more)


def run(
    terms: StartTerms, state: LauncherState, *events: Event | tuple[float, Event]
) -> tuple[LauncherState, list[Action]]:
    """The state after the events, each at NOW or so many seconds later.

    And the last one's actions.
    """
    actions: list[Action] = []
    for each in events:
        seconds, event = each if isinstance(each, tuple) else (0.0, each)
        state, actions = step(terms, state, event, at(seconds))
    return state, actions


def fresh(terms: StartTerms) -> LauncherState:
    return begin(terms, Resized())


def in_phase(terms: StartTerms, phase: Phase, move: MoveNotice | None = None) -> LauncherState:
    """A state of that phase, both workers running; LEAVING is for `move`."""
    state = replace(fresh(terms), move=move, phase=phase)
    if move is not None and terms.hub:
        state = replace(state, staying=state.staying - move.leaving, leaving=move.leaving)
    if phase is Phase.LEAVING:
        state = replace(state, grace_begun=True, term_at=NOW.clock + 8, kill_at=NOW.clock + 16)
    if phase is Phase.FAILING:
        state = replace(state, term_at=NOW.clock + 3, decide_by=NOW.clock + 18)
    if phase is Phase.STOPPING:
        state = replace(state, stopped_by=signal.SIGTERM, kill_at=NOW.clock + 10)
    return state


def ended(terms: StartTerms, *statuses: int, state: LauncherState | None = None) -> LauncherState:
    state = state or fresh(terms)
    return run(terms, state, *(WorkerEnded(rank, end(status)) for rank, status in enumerate(statuses)))[0]


def finish(actions: Iterable[Action]) -> Finish | None:
    return next((action for action in actions if isinstance(action, Finish)), None)
