"""Waiting times of moves, by a clock that does not step."""

from __future__ import annotations

from polluxd.apply.stopwatch import Stopwatch
from polluxd.model import Move, Placement, Step
from tests.build import move as build_move


class Clocks:
    """A wall clock that may be set, and seconds that only go forward."""

    def __init__(self) -> None:
        self.wall, self.ticks = 1000.0, 50.0

    def advance(self, seconds: float) -> None:
        self.wall += seconds
        self.ticks += seconds


def move(number: int, at: float) -> Move:
    return build_move(
        "start", target=Placement(("n1",), 1), times={Step.PLANNED: at}, id=number, job_id=number
    )


def watch(clocks: Clocks) -> Stopwatch:
    return Stopwatch(lambda: clocks.wall, lambda: clocks.ticks)


def test_a_step_is_waited_for_since_it_was_recorded_whatever_the_wall_clock_does_later() -> None:
    clocks = Clocks()
    stopwatch, the_move = watch(clocks), move(1, 990.0)
    assert stopwatch.waited(the_move) == 10.0
    clocks.advance(5.0)
    clocks.wall -= 3600.0
    assert stopwatch.waited(the_move) == 15.0


def test_a_step_in_the_future_counts_from_now() -> None:
    clocks = Clocks()
    assert watch(clocks).waited(move(1, 2000.0)) == 0.0


def test_tries_are_remembered_for_moves_that_are_kept() -> None:
    clocks = Clocks()
    stopwatch, first, second = watch(clocks), move(1, 1000.0), move(2, 1000.0)
    assert stopwatch.since_try(first) == float("inf")
    stopwatch.try_now(first)
    stopwatch.try_now(second)
    clocks.advance(3.0)
    stopwatch.keep([first])
    assert stopwatch.since_try(first) == 3.0
    assert stopwatch.since_try(second) == float("inf")
