"""The ids of moves in the log: job, move, and the deciding cycle."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from polluxd import logs
from polluxd.model import Move


class MoveIds:
    """Remembers which cycle decided on each open move.

    A move that an earlier process began has no cycle here: the line of its beginning names both.
    """

    def __init__(self) -> None:
        self._cycles: dict[int, int] = {}

    def decided(self, cycle: int, begun: Sequence[Move]) -> None:
        """Take the cycle that decided on these moves."""
        self._cycles |= {move.id: cycle for move in begun}

    def keep(self, moves: Sequence[Move]) -> None:
        """Forget all moves but these, which are open."""
        self._cycles = {move.id: self._cycles[move.id] for move in moves if move.id in self._cycles}

    def about(self, move: Move) -> AbstractContextManager[None]:
        """Add a move's ids to every line that the body logs."""
        cycle = {"cycle": self._cycles[move.id]} if move.id in self._cycles else {}
        return logs.about(**cycle, job=move.job_id, move=move.id)
