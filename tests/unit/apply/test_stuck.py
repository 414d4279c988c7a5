"""Moves that stay in a step for too long, and jobs that rest after a move."""

from __future__ import annotations

import pytest

from polluxd.apply.cooldowns import Cooldowns
from polluxd.apply.stopwatch import PATIENCE, in_step_since, stuck_moves
from polluxd.config.settings import MoveSettings
from polluxd.model import Move, Placement, Step
from tests.build import move as build_move

NOW = 1_800_000_000.0
LIMITS = MoveSettings()
TIMEOUTS = (
    "planned_timeout_s",
    "drain_timeout_s",
    "requeued_timeout_s",
    "start_timeout_s",
    "training_timeout_s",
    "recruit_timeout_s",
    "give_back_timeout_s",
)


def move(number: int, since: float, *, path: str = "requeue") -> Move:
    times = {Step.PLANNED: 5.0, Step.DRAINING: since}
    return build_move(
        path, target=Placement(("n1",), 1), step=Step.DRAINING, times=times, id=number, job_id=number
    )


@pytest.mark.parametrize("longest", TIMEOUTS)
def test_a_move_is_stuck_after_a_multiple_of_the_longest_timeout(longest: str) -> None:
    limits = MoveSettings(**{**dict.fromkeys(TIMEOUTS, 10.0), longest: 500.0})  # type: ignore[arg-type]
    patience = PATIENCE * 500.0
    moves = [move(1, NOW - patience - 1), move(2, NOW - patience), move(3, NOW - patience - 9)]
    assert [stuck.id for stuck in stuck_moves(moves, limits, NOW)] == [3, 1]


def test_a_move_without_a_time_for_its_step_counts_from_its_plan() -> None:
    moved = move(1, 7.0)
    assert in_step_since(moved) == 7.0
    assert in_step_since(build_move("park", step=Step.DRAINING, times={})) == 0.0
    planned = {Step.PLANNED: 5.0}
    assert in_step_since(build_move("park", step=Step.DRAINING, times=planned)) == 5.0


class Rest:
    """Cooldowns of 60 s, and the clock that they read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.cooldowns = Cooldowns(60.0, lambda: self.now)

    def left(self) -> float:
        return self.cooldowns.left(1)


def test_a_job_rests_after_a_move_and_not_after_a_resize_in_place() -> None:
    rest = Rest()
    assert rest.left() == 0.0
    rest.cooldowns.completed(move(1, NOW), took=90.0)
    rest.now += 20.0
    assert rest.left() == 40.0
    rest.now += 1000.0
    assert rest.left() == 0.0
    rest.cooldowns.completed(move(1, NOW), took=5.0)
    assert rest.left() == 5.0, "no longer than the move took"
    rest.cooldowns.completed(move(1, NOW, path="resize"), took=5.0)
    assert rest.left() == 0.0
    rest.cooldowns.failed(move(1, NOW, path="resize"))
    assert rest.left() == 120.0, "a resize that failed is not tried again at once"


def test_each_failure_doubles_the_rest_up_to_a_bound_and_a_completed_move_ends_that() -> None:
    rest = Rest()
    found = []
    for _ in range(8):
        rest.cooldowns.failed(move(1, NOW))
        found.append(rest.left())
    assert found == [60.0 * 2**n for n in (1, 2, 3, 4, 5, 6, 6, 6)]
    rest.cooldowns.completed(move(1, NOW), took=90.0)
    assert rest.left() == 60.0


def test_a_withdrawn_move_begins_the_last_rest_again() -> None:
    rest = Rest()
    rest.cooldowns.begin(1)
    assert rest.left() == 60.0
    rest.cooldowns.failed(move(1, NOW))
    rest.now += 100.0
    rest.cooldowns.begin(1)
    assert rest.left() == 120.0
    rest.cooldowns.completed(move(1, NOW, path="resize"), took=5.0)
    rest.now += 5.0
    rest.cooldowns.begin(1)
    assert rest.left() == 60.0, "after a resize in place, too"


def test_jobs_that_are_gone_are_forgotten() -> None:
    rest = Rest()
    for number in (1, 2):
        rest.cooldowns.failed(move(number, NOW))
    rest.cooldowns.keep({2}, set())
    assert (rest.cooldowns.left(1), rest.cooldowns.left(2)) == (0.0, 120.0)


def test_a_job_without_gpus_rests_only_after_a_person_cancelled_its_move() -> None:
    rest = Rest()
    for number in (1, 2):
        rest.cooldowns.failed(move(number, NOW))
    rest.cooldowns.begin(2)
    rest.cooldowns.keep(set(), {1, 2})
    assert rest.cooldowns.left(1) == 0.0
    assert rest.cooldowns.left(2) == 120.0
