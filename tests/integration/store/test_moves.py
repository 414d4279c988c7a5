"""Moves in the database.

Their steps are legal, one job has one move at a time, only the leader writes, and a move records its cost.
"""

from __future__ import annotations

import time

import psycopg2
import pytest

from polluxd.errors import LeaderLost, StoreRejected
from polluxd.model import NO_PLACEMENT, Placement, Step

pytestmark = pytest.mark.slurm

SMALL = Placement(("n1",), 2)
LARGE = Placement(("n1", "n2"), 4)


def test_a_move_goes_forward_only_and_each_step_has_its_time(store, epoch):
    move = store.plan_move(7, 0, "requeue", SMALL, LARGE, "more goodput", epoch, at=100.0)
    assert (move.step, move.source, move.target, move.reason) == (Step.PLANNED, SMALL, LARGE, "more goodput")
    assert store.advance(move.id, Step.DRAINING, 101.0, epoch=epoch)
    assert not store.advance(move.id, Step.DRAINING, 102.0, epoch=epoch)
    assert store.advance(move.id, Step.REQUEUED, 103.0, epoch=epoch, detail="no acknowledgement")
    assert not store.advance(move.id, Step.CHECKPOINTED, 104.0, epoch=epoch)
    assert store.advance(move.id, Step.TRAINING, 105.0, epoch=epoch, detail="late")
    assert not store.advance(move.id, Step.FAILED, 106.0, epoch=epoch)
    assert store.open_moves() == []
    (done,) = store.moves(7)
    assert done.times == {Step.PLANNED: 100, Step.DRAINING: 101, Step.REQUEUED: 103, Step.TRAINING: 105}
    assert done.detail == "no acknowledgement; late"


def test_a_job_has_one_move_at_a_time(store, epoch):
    move = store.plan_move(7, 0, "requeue", SMALL, LARGE, "a", epoch)
    with pytest.raises(StoreRejected, match="move_one_open"):
        store.plan_move(7, 0, "requeue", SMALL, LARGE, "b", epoch)
    store.plan_move(8, 0, "start", NO_PLACEMENT, SMALL, "c", epoch)
    store.advance(move.id, Step.FAILED, time.time(), epoch=epoch)
    store.plan_move(7, 0, "requeue", SMALL, LARGE, "d", epoch)
    assert [m.reason for m in store.open_moves()] == ["c", "d"]


@pytest.mark.parametrize(("path", "end"), [("park", Step.TRAINING), ("requeue", Step.PARKED)])
def test_a_path_has_its_own_end(store, epoch, path, end):
    move = store.plan_move(7, 0, path, SMALL, NO_PLACEMENT, "x", epoch)
    with pytest.raises(StoreRejected, match="cannot go"):
        store.advance(move.id, end, time.time(), epoch=epoch)


@pytest.mark.parametrize(
    "change",
    [
        "step = 'planned'",
        "step = 'checkpointed'",
        "step = 'elsewhere'",
        "step = 'started'",  # without its time
        "job_id = 8",
        "attempt = 5",
        "target = '{}'",
    ],
)
def test_the_guard_holds_for_statements_by_hand(store, epoch, postgres, change):
    move = store.plan_move(7, 0, "requeue", SMALL, LARGE, "x", epoch)
    store.advance(move.id, Step.REQUEUED, time.time(), epoch=epoch)
    with pytest.raises(psycopg2.Error):
        postgres.execute(f"UPDATE pollux.move SET {change} WHERE id = {move.id}")


def test_an_older_epoch_writes_nothing(new_store, store, epoch, seen):
    move = store.plan_move(7, 0, "requeue", SMALL, LARGE, "x", epoch)
    store.sync_jobs([seen(7)])
    store.resign()
    newer = new_store()
    assert newer.lead() == epoch + 1
    with pytest.raises(LeaderLost, match=f"epoch {epoch}"):
        store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    with pytest.raises(LeaderLost):
        store.plan_move(9, 0, "start", NO_PLACEMENT, SMALL, "x", epoch)
    assert newer.advance(move.id, Step.DRAINING, time.time(), epoch=epoch + 1)
    assert newer.moves(9) == []


def test_the_cost_of_a_move_is_the_agents_pause_split_by_step(store, epoch, agent, report, seen):
    began = time.time() - 60
    store.sync_jobs([seen(7)])
    move = store.plan_move(7, 0, "requeue", SMALL, LARGE, "x", epoch, at=began)
    store.advance(move.id, Step.DRAINING, began + 1, epoch=epoch)
    agent(7).acknowledge(move.id, last_step_at=began + 2, stopped_at=began + 2.5, checkpoint_s=0.25, step=9)
    store.take_in()
    # an acknowledgement is stamped by the server's clock: the later steps of this test lie after it
    acknowledged = store.open_moves()[0].times[Step.CHECKPOINTED]
    for step, after in ((Step.REQUEUED, 1), (Step.CONFIGURED, 3), (Step.STARTED, 4)):
        store.advance(move.id, step, acknowledged + after, epoch=epoch)
    stamps = {"launched_at": 4.5, "imported_at": 6, "attached_at": 7, "restored_at": 7.25, "first_step_at": 8}
    agent(7, attempt=1).publish(report(times={name: acknowledged + after for name, after in stamps.items()}))
    store.advance(move.id, Step.TRAINING, acknowledged + 9, epoch=epoch)
    # The next attempt's reports must not change what this move has cost.
    store.sync_jobs([seen(7, restart_count=1)])
    agent(7, attempt=2).publish(report(times={"first_step_at": acknowledged + 50}))

    (cost,) = store.move_costs(7)
    pause = acknowledged + 8 - (began + 2)
    assert (cost["from"], cost["to"], cost["path"]) == ("n1:2", "n1:4,n2:4", "requeue")
    assert cost["measured"]
    assert cost["drained_s"] == pytest.approx(1)
    assert cost["total_s"] == pytest.approx(pause)
    assert sum(cost["steps"].values()) == pytest.approx(pause)
    expected = {
        "stop": 0.5,
        "requeue": 1,
        "configure": 2,
        "start": 1,
        "launch": 0.5,
        "import": 1.5,
        "attach": 1,
    }
    assert {name: cost["steps"][name] for name in expected} == pytest.approx(expected)
    assert cost["steps"]["first_step"] == pytest.approx(0.75)
    total = store.records(restarts_since=0.0).totals[7]
    assert (total.count, total.lost_seconds) == (1, pytest.approx(pause))
    assert total.mean_cost == {"requeue": pytest.approx(pause)}


def test_first_starts_cost_nothing_and_a_return_from_parking_does(store, seen, epoch):
    store.sync_jobs([seen(7)])
    now = time.time()
    first = store.plan_move(7, 0, "start", NO_PLACEMENT, SMALL, "x", epoch, at=now + 100.0)
    for step, at in (
        (Step.CONFIGURED, now + 101.0),
        (Step.STARTED, now + 102.0),
        (Step.TRAINING, now + 109.0),
    ):
        store.advance(first.id, step, at, epoch=epoch)
    assert store.records(restarts_since=0.0).totals == {}
    again = store.plan_move(7, 1, "start", NO_PLACEMENT, SMALL, "x", epoch, at=now + 200.0)
    for step, at in (
        (Step.CONFIGURED, now + 201.0),
        (Step.STARTED, now + 202.0),
        (Step.TRAINING, now + 205.0),
    ):
        store.advance(again.id, step, at, epoch=epoch)
    total = store.records(restarts_since=0.0).totals[7]
    assert (total.count, total.lost_seconds) == (1, pytest.approx(4.0))
    assert not store.move_costs(7)[0]["measured"]
