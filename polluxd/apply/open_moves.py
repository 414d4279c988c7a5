"""What this process knows of moves under way: how long they wait, and which cycle decided on them.

The database stores the times of moves in POSIX seconds, so that another polluxd can continue from them. A wall clock
that is set back by an hour would make a bounded wait last an hour longer; a clock that is set forward would end all
waits at once. So a process reads the wall clock once for each step of a move, when it first sees the step, and counts
on from there by the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from math import inf

from polluxd import logs
from polluxd.apply.actions import NOT_BOOTED
from polluxd.apply.capacity import goes_back
from polluxd.config.settings import MoveSettings
from polluxd.model import Move, Node, Step

Stage = tuple[int, Step]
"""A move, by its id, at one of its steps."""
PATIENCE = 2
"""A move that stays in one step for so many times the longest timeout of [moves] is stuck."""


class OpenMoves:
    """The moves under way."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._since: dict[Stage, float] = {}
        self._tried: dict[Stage, float] = {}
        self._cycles: dict[int, int] = {}
        """By move: the cycle that decided on it, in this process."""
        self._booting: frozenset[str] = frozenset()
        self._dead: frozenset[str] = frozenset()
        """Nodes that have not come up since they booted."""

    def waited(self, move: Move, *, kept_off: bool = False) -> float:
        """Seconds for which `move` has been at its step.

        None pass while a node of its target boots, or while the job is kept off its target.
        """
        stage = move.id, move.step
        now = self._monotonic()
        if kept_off or not self._booting.isdisjoint(move.target.nodes):
            self._since[stage] = now
        if stage not in self._since:
            # Use the time of this step only: an earlier step may have a later time if the clock was set back.
            recorded = move.times.get(move.step, self._clock())
            self._since[stage] = now - max(0.0, self._clock() - recorded)
        return now - self._since[stage]

    def with_cause(self, move: Move, failure: str) -> str:
        """Return why a move failed, with the nodes of its target that did not boot."""
        dead = sorted(self._dead.intersection(move.target.nodes))
        return f"{failure}; {NOT_BOOTED}{', '.join(dead)}" if dead else failure

    def try_now(self, move: Move) -> None:
        """Note that polluxd is about to make a call for `move` at this step."""
        self._tried[move.id, move.step] = self._monotonic()

    def since_try(self, move: Move) -> float:
        """Return the seconds since the last `try_now` of this process at this step; infinite without one."""
        return self._monotonic() - self._tried.get((move.id, move.step), -inf)

    def decided(self, cycle: int, begun: Iterable[Move]) -> None:
        """Take the cycle that decided on these moves."""
        self._cycles |= {move.id: cycle for move in begun}

    def about(self, move: Move) -> AbstractContextManager[None]:
        """Add the ids of a move to every line that the body logs: its job, itself, and the deciding cycle."""
        cycle = {"cycle": self._cycles[move.id]} if move.id in self._cycles else {}
        return logs.about(**cycle, job=move.job_id, move=move.id)

    def keep(self, moves: Iterable[Move], nodes: Sequence[Node] = ()) -> None:
        """Forget all but these moves; note which of the nodes boot, and which did so in vain."""
        up = {node.name for node in nodes if node.power == "on" and node.schedulable}
        booting = frozenset(node.name for node in nodes if node.power == "booting")
        self._dead = (self._dead | self._booting) - booting - up
        self._booting = booting
        known = {move.id for move in moves}
        self._since, self._tried = (
            {stage: at for stage, at in times.items() if stage[0] in known}
            for times in (self._since, self._tried)
        )
        self._cycles = {number: cycle for number, cycle in self._cycles.items() if number in known}


def stuck_moves(moves: Sequence[Move], limits: MoveSettings, now: float) -> list[Move]:
    """Return the moves that stay in their step for too long, oldest first."""
    longest = max(value for name, value in limits if name.endswith("_timeout_s"))
    return sorted((m for m in moves if now - in_step_since(m) > PATIENCE * longest), key=in_step_since)


def in_step_since(move: Move) -> float:
    """Return when the move entered its present step (POSIX time)."""
    return move.times.get(move.step, move.times.get(Step.PLANNED, 0.0))


def in_order(moves: Iterable[Move]) -> list[Move]:
    """Return moves in the order of their next actions.

    A stopped training goes back first. Then moves that give GPUs back come before those that take them.
    """
    return sorted(moves, key=lambda m: (not goes_back(m), m.target.gpus - m.source.gpus, m.id))
