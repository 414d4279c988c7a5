"""What a job that does not take its GPUs costs others."""

from __future__ import annotations

import pytest

from polluxd.apply.headroom import Headroom
from polluxd.apply.others_pay import OthersPay
from polluxd.model import JobSpec, JobState, Move, Placement, Step
from polluxd.slurm.protocol import ClusterState
from tests.build import move as build_move
from tests.unit.apply.four_nodes import HOUR, NODES, NOW, job

ONE, TWO = Placement(("n1",), 4), Placement(("n1", "n2"), 4)
USERS = {1: "alice", 2: "bob", 3: "alice"}
STATE = ClusterState(NOW, NODES, (job(1), job(2, user="bob", submit_time=NOW - HOUR)))


def moved(number: int, job_id: int, source: Placement, target: Placement, path: str = "requeue") -> Move:
    return build_move(path, source, target, Step.PLANNED, {Step.PLANNED: 1.0}, id=number, job_id=job_id)


GROWS, GIVES = moved(1, 1, ONE, TWO), moved(2, 2, Placement(("n2",), 4), Placement(("n3",), 2))


def after(
    grows: str, gives: Move = GIVES, took: float = 40.0, times: int = 1, gave: str = "completed"
) -> Headroom:
    pay = OthersPay()
    for _ in range(times):
        pay.begun([GROWS, gives], USERS)
        pay.ended(GROWS, grows, 5.0)
        pay.ended(gives, gave, took)
    return pay.lowered(Headroom(), STATE)


def test_a_job_for_which_others_stood_for_nothing_grows_no_more() -> None:
    most, rule = after("failed").most[1]
    assert most == 4, "what it holds"
    assert "cost them 40 s" in rule
    assert after("withdrawn").most.keys() == {1}
    assert after("failed", took=12.0, times=4).most.keys() == {1}, "the costs add up"


def test_a_trainer_of_its_own_loop_gets_the_size_that_its_user_asked_for() -> None:
    waits = job(1, JobState.PENDING, spec=JobSpec(own_size=2))
    pay = OthersPay()
    pay.begun([GROWS, GIVES], USERS)
    pay.ended(GROWS, "failed", 5.0)
    pay.ended(GIVES, "completed", 40.0)
    state = ClusterState(NOW, NODES, (waits, STATE.jobs[1]))
    assert pay.lowered(Headroom(), state).most[1][0] == 2, "on fewer it may not start"


@pytest.mark.parametrize(
    ("grows", "gives", "took"),
    [
        ("completed", GIVES, 40.0),
        ("failed", GIVES, 35.0),
        ("failed", moved(2, 3, GIVES.source, GIVES.target), 40.0),
        ("failed", moved(2, 2, TWO, Placement(("n2",), 4), "resize"), 40.0),
        ("failed", moved(2, 2, Placement(("n4",), 4), Placement(("n3",), 4)), 40.0),
    ],
)
def test_what_came_to_something_or_cost_nobody_else_bars_nothing(
    grows: str, gives: Move, took: float
) -> None:
    assert after(grows, gives, took).most == {}


def test_a_job_is_not_charged_for_one_that_did_not_give_way() -> None:
    assert after("failed", gave="failed").most == {}


def test_the_count_ends_with_the_job() -> None:
    pay = OthersPay()
    pay.begun([GROWS, GIVES], USERS)
    pay.ended(GIVES, "completed", 40.0)
    pay.ended(GROWS, "failed", 50.0)
    assert pay.lowered(Headroom(), STATE).most
    ended = ClusterState(NOW, NODES, (job(1, JobState.COMPLETED), STATE.jobs[1]))
    assert not pay.lowered(Headroom(), ended).most
    assert not pay.lowered(Headroom(), STATE).most
