"""Moves that stay in one step for too long. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from polluxd.config.settings import MoveSettings
from polluxd.model import Move, Step

PATIENCE = 2
"""A move that stays in one step for so many times the longest timeout of [moves] is stuck."""


def stuck_moves(moves: Sequence[Move], limits: MoveSettings, now: float) -> list[Move]:
    """Return the moves that stay in their step for too long, oldest first."""
    patience = PATIENCE * _longest_step(limits)
    return sorted((move for move in moves if now - in_step_since(move) > patience), key=in_step_since)


def in_step_since(move: Move) -> float:
    """Return when the move entered its present step (POSIX time)."""
    return move.times.get(move.step, move.times.get(Step.PLANNED, 0.0))


def _longest_step(limits: MoveSettings) -> float:
    """Return the longest timeout of one step of a move [s]."""
    return max(
        limits.planned_timeout_s,
        limits.drain_timeout_s,
        limits.requeued_timeout_s,
        limits.start_timeout_s,
        limits.training_timeout_s,
        limits.recruit_timeout_s,
        limits.give_back_timeout_s,
    )
