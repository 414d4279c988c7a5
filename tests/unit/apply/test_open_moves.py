"""How long moves wait, by a clock that does not step."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest

from polluxd.apply.open_moves import PATIENCE, OpenMoves, in_step_since, stuck_moves
from polluxd.config.settings import MoveSettings
from polluxd.model import Move, Placement, Step
from tests.build import move as build_move

NOW = 1_800_000_000.0
TIMEOUTS = [name for name in MoveSettings.model_fields if name.endswith("_timeout_s")]


@dataclass
class Clocks:
    """A wall clock that may be set, and seconds that only go forward."""

    wall: float = 1000.0
    ticks: float = 50.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds

    def watch(self) -> OpenMoves:
        return OpenMoves(lambda: self.wall, lambda: self.ticks)


def move(number: int, step: Step = Step.PLANNED, **times: float) -> Move:
    reached = {Step(name): at for name, at in times.items()}
    return build_move(
        "start", target=Placement(("n1",), 1), step=step, times=reached, id=number, job_id=number
    )


def test_a_step_is_waited_for_since_it_was_recorded_whatever_the_wall_clock_does_later() -> None:
    clocks = Clocks()
    moves, the_move = clocks.watch(), move(1, planned=990.0)
    assert moves.waited(the_move) == 10.0
    clocks.advance(5.0)
    clocks.wall -= 3600.0
    assert moves.waited(the_move) == 15.0
    assert moves.waited(move(2, planned=2000.0)) == 0.0, "a step in the future counts from now"


def test_tries_are_remembered_for_moves_that_are_kept() -> None:
    clocks = Clocks()
    moves, first, second = clocks.watch(), move(1, planned=1000.0), move(2, planned=1000.0)
    assert moves.since_try(first) == inf
    moves.try_now(first)
    moves.try_now(second)
    clocks.advance(3.0)
    moves.keep([first])
    assert (moves.since_try(first), moves.since_try(second)) == (3.0, inf)


@pytest.mark.parametrize("longest", TIMEOUTS)
def test_a_move_is_stuck_after_a_multiple_of_the_longest_timeout(longest: str) -> None:
    assert len(TIMEOUTS) == 7
    limits = MoveSettings(**{**dict.fromkeys(TIMEOUTS, 10.0), longest: 500.0})
    since = {1: 1.0, 2: 0.0, 3: 9.0}
    moves = [
        move(number, Step.DRAINING, planned=5.0, draining=NOW - PATIENCE * 500.0 - more)
        for number, more in since.items()
    ]
    assert [stuck.id for stuck in stuck_moves(moves, limits, NOW)] == [3, 1]


def test_a_move_without_a_time_for_its_step_counts_from_its_plan() -> None:
    assert in_step_since(move(1, Step.DRAINING, planned=5.0, draining=7.0)) == 7.0
    assert in_step_since(move(1, Step.DRAINING, planned=5.0)) == 5.0
    assert in_step_since(move(1, Step.DRAINING)) == 0.0
