"""Jobs that rest after a move."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.past_moves import PastMoves
from polluxd.model import Move, Placement, Step
from tests.build import move as build_move

LONGEST = 60.0


def move(number: int = 1, path: str = "requeue") -> Move:
    return build_move(path, id=number, job_id=number)


class Rest:
    """Cooldowns of 60 s, and the clock that they read."""

    def __init__(self) -> None:
        self.now = 100.0
        self.past = PastMoves(LONGEST, lambda: self.now)

    def left(self, job_id: int = 1) -> float:
        return self.past.cooldown(job_id)


@pytest.fixture
def rest() -> Rest:
    return Rest()


def test_a_job_rests_after_a_move_and_not_after_a_resize_in_place(rest: Rest) -> None:
    assert rest.left() == 0.0
    rest.past.completed(move(), took=90.0)
    rest.now += 20.0
    assert rest.left() == 40.0
    rest.now += 1000.0
    assert rest.left() == 0.0
    rest.past.completed(move(), took=5.0)
    assert rest.left() == 5.0, "no longer than the move took"
    rest.past.completed(move(path="resize"), took=5.0)
    assert rest.left() == 0.0
    rest.past.failed(move(path="resize"))
    assert rest.left() == 60.0, "a resize that failed is not tried again at once"


def test_a_failure_and_a_cancellation_begin_a_whole_rest(rest: Rest) -> None:
    for _ in range(3):
        rest.past.failed(move())
        assert rest.left() == LONGEST
    rest.past.failed(move(), rest=False)
    rest.now += 20.0
    assert rest.left() == LONGEST - 20.0, "as long as before"
    rest.past.failed(move(), person=True)
    assert rest.left() == LONGEST


def test_jobs_without_gpus_rest_only_after_a_person_cancelled_their_moves(rest: Rest) -> None:
    for number in (1, 2, 3, 4):
        rest.past.failed(move(number), undrained=number == 2)
    rest.past.failed(move(3), person=True)
    rest.past.keep({1}, {2, 3})
    assert [rest.left(n) for n in (1, 2, 3, 4)] == [60.0, 0.0, 60.0, 0.0], "the last is gone"
    assert [rest.past.undrained(n) for n in (1, 2, 4)] == [0, 1, 0]


def test_a_job_whose_starts_fail_one_after_another_rests_while_it_waits(rest: Rest) -> None:
    """Whoever requeues a job at each start would have polluxd start it every few seconds, for good."""
    start = replace(move(path="start"), step=Step.STARTED, target=Placement(("n1",), 4))
    for left in (0.0, LONGEST, LONGEST):
        rest.past.failed(start)
        rest.past.keep((), {1})
        assert rest.left() == left
    rest.past.completed(start, took=0.0)
    rest.past.failed(start)
    rest.past.keep((), {1})
    assert rest.left() == 0.0, "it has trained since"
