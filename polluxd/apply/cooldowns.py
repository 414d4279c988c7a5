"""Leave a job alone for a while after a move (its cooldown).

The cooldown depends on the cost of the move, so a job that started within seconds may soon grow. A job without GPUs has
no training to protect: it rests only after a person has cancelled its move.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

from polluxd.model import Move

_MOST_DOUBLINGS = 6


@dataclass(slots=True)
class _Past:
    """The end of a job's newest move."""

    ended_at: float
    """By a clock that does not step [s]."""
    failures: int = 0
    """Moves that failed since the last one that completed."""
    rest: float = math.inf
    """The cooldown is no longer than the move took [s]. It is 0 after a resize in place."""
    cancelled: bool = False
    """A person has cancelled the move."""


class Cooldowns:
    """The cooldowns of all jobs, which double with each failed move.

    A restart of polluxd loses them; the loss costs one early retry at most.

    Args:
        cooldown: longest cooldown after a move that did not fail [s].
        monotonic: seconds that only go forward.
    """

    def __init__(self, cooldown: float, monotonic: Callable[[], float]) -> None:
        self._cooldown = cooldown
        self._monotonic = monotonic
        self._past: dict[int, _Past] = {}

    def left(self, job_id: int) -> float:
        """Return the rest of the job's cooldown [s]."""
        past = self._past.get(job_id)
        if past is None:
            return 0.0
        whole = min(self._cooldown * 2.0 ** min(past.failures, _MOST_DOUBLINGS), past.rest)
        return max(0.0, past.ended_at + whole - self._monotonic())

    def completed(self, move: Move, took: float) -> None:
        """Begin a cooldown, no longer than the move took [s].

        None begins after a resize in place: the job may be resized again at once.
        """
        self._past[move.job_id] = _Past(self._monotonic(), rest=0.0 if move.path == "resize" else took)

    def failed(self, move: Move) -> None:
        """Begin a cooldown twice as long as after the failure before."""
        past = self._past.get(move.job_id)
        self._past[move.job_id] = _Past(self._monotonic(), failures=past.failures + 1 if past else 1)

    def begin(self, job_id: int) -> None:
        """Begin a cooldown as long as the job's last one, after a person has cancelled its move."""
        past = self._past.setdefault(job_id, _Past(self._monotonic()))
        past.ended_at, past.rest, past.cancelled = self._monotonic(), math.inf, True

    def keep(self, holding: Collection[int], waiting: Collection[int]) -> None:
        """Forget all other jobs than those that hold GPUs, and those that wait after a cancelled move."""
        self._past = {
            job_id: past
            for job_id, past in self._past.items()
            if job_id in holding or (past.cancelled and job_id in waiting)
        }
