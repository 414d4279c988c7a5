"""How long ago something was, by a clock that does not step.

The times of moves are in the database, in POSIX seconds, so that another polluxd can go on from them. A wall clock
that is set back by an hour would make a bounded wait last an hour longer, and one set forward would end all of them at
once. So a process believes the wall clock once for each step, when it first sees it, and counts on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from polluxd.model import Move, Step

Stage = tuple[int, Step]
"""A move, by its id, at one of its steps."""


class Stopwatch:
    """Waiting times of moves under way, and times of the last calls for them.

    Args:
        clock: POSIX time [s].
        monotonic: seconds that only go forward.
    """

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._since: dict[Stage, float] = {}
        self._tried: dict[Stage, float] = {}

    def waited(self, move: Move) -> float:
        """Seconds for which `move` has been at its step."""
        stage = move.id, move.step
        now = self._monotonic()
        if stage not in self._since:
            # Of the step itself: an earlier one's time may be later, where the clock was set back in between.
            recorded = move.times.get(move.step, self._clock())
            self._since[stage] = now - max(0.0, self._clock() - recorded)
        return now - self._since[stage]

    def try_now(self, move: Move) -> None:
        """A call is about to be made for `move` at its present step."""
        self._tried[move.id, move.step] = self._monotonic()

    def since_try(self, move: Move) -> float:
        """Return the seconds since the last `try_now` at this step.

        Infinite where this process has not called `try_now` at this step.
        """
        tried = self._tried.get((move.id, move.step))
        return float("inf") if tried is None else self._monotonic() - tried

    def keep(self, moves: Iterable[Move]) -> None:
        """Forget all but these moves."""
        known = {move.id for move in moves}
        for times in (self._since, self._tried):
            for stage in [stage for stage in times if stage[0] not in known]:
                del times[stage]
