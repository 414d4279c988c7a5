"""Moves within an allocation, as agents read and acknowledge them.

The tests also check the cost that such a move records.
"""

from __future__ import annotations

import time

import pytest

from polluxd.model import Placement, Step
from tests.integration.store.conftest import advance

pytestmark = pytest.mark.slurm

SMALL, LARGE = Placement(("n1",), 4), Placement(("n1", "n3"), 4)


def test_a_grow_is_told_from_recruiting_until_its_first_step(store, agent, epoch):
    job = agent(7)
    move = store.plan_move(7, 0, "resize", SMALL, LARGE, "grow", epoch)
    assert job.instructions() == {"drain": None, "resize": None}
    told = {"id": move.id, "path": "resize", "kind": "grow", "nodes": ["n1", "n3"], "gpus_per_node": 4}
    told["nonce"] = move.nonce
    for step in (Step.RECRUITING, Step.CONFIGURED, Step.STARTED):
        advance(store, epoch, move, step)
        assert job.instructions() == {"drain": None, "resize": told | {"step": step.value}}
        assert agent(7, attempt=1).instructions()["resize"] is None
    assert job.acknowledge(move.id) is False, "a grow is not acknowledged"
    advance(store, epoch, move, Step.TRAINING)
    assert job.instructions()["resize"] is None


def test_a_shrink_is_told_until_it_is_acknowledged(store, agent, epoch):
    job = agent(7)
    job.publish()
    move = store.plan_move(7, 0, "resize", LARGE, SMALL, "shrink", epoch)
    advance(store, epoch, move, Step.DRAINING)
    told = {"id": move.id, "path": "resize", "kind": "shrink", "nodes": ["n1"], "gpus_per_node": 4}
    assert job.instructions() == {"drain": None, "resize": told | {"step": "draining"}}
    assert job.acknowledge(move.id) is True
    store.take_in()
    assert job.instructions()["resize"] is None
    assert store.reports()[7].checkpointed is False
    assert store.open_moves()[0].step is Step.CHECKPOINTED


def test_what_a_job_is_able_to_and_has_done_is_kept(store, agent, report, seen):
    agent(7).publish(report())
    before = store.reports()[7]
    assert (before.resize, before.resized, before.refused, before.resize_cost) == ("requeue", 0, 0, None)
    refused = {"id": 12, "why": "sbatch is\nforbidden " + "x" * 400}
    agent(7).publish(report(resize="in-place", resized=11, resize_refused=refused, resize_cost=0.25))
    after = store.reports()[7]
    assert (after.resize, after.resized, after.refused, after.resize_cost) == ("in-place", 11, 12, 0.25)
    assert after.refused_why.startswith("sbatch is forbidden xx")
    assert len(after.refused_why) == 300
    agent(7, attempt=1).publish(report())
    assert store.reports()[7].resized == 11, "polluxd has not seen the other attempt"
    store.sync_jobs([seen(7, restart_count=1)])
    assert store.reports()[7].resized == 0, "another attempt knows nothing of it"


def test_news_of_a_resize_wake_polluxd_and_repetitions_do_not(store, agent, report, seen, epoch):
    agent(7).publish(report())
    store.sync_jobs([seen(7)])
    move = store.plan_move(7, 0, "resize", SMALL, LARGE, "x", epoch)
    agent(7).publish(report(resized=move.id))
    assert store.wait(60, for_news=True) is True
    agent(7).publish(report(resized=move.id))
    assert store.wait(1.2, for_news=True) is False
    agent(7).publish(report(resize_refused={"id": move.id, "why": ""}, resized=move.id))
    assert store.wait(60, for_news=True) is True


def test_a_resize_costs_what_its_agent_says_and_is_counted_by_its_path(store, agent, report, seen, epoch):
    store.sync_jobs([seen(7)])
    for path, source, target, claimed in (("resize", SMALL, LARGE, 0.02), ("resize", LARGE, SMALL, 0.08)):
        move = store.plan_move(7, 0, path, source, target, "x", epoch)
        advance(store, epoch, move, Step.DRAINING)
        time.sleep(0.1)  # a move takes longer than the pause that its agent measures
        now = time.time()
        times = {"launched_at": now - 0.06, "imported_at": now - 0.03, "first_step_at": now}
        agent(7).publish(report(resized=move.id, resize_cost=claimed, times=times))
        advance(store, epoch, move, Step.CHECKPOINTED, Step.CONFIGURED, Step.TRAINING)
    resized, shrunk = store.move_costs(7)
    assert (resized["path"], resized["total_s"], resized["steps"]) == ("resize", 0.02, {"resize": 0.02})
    assert shrunk["total_s"] == pytest.approx(0.08)
    assert all(cost["measured"] for cost in (resized, shrunk))
    total = store.records(restarts_since=0.0).totals[7]
    assert (total.count, total.lost_seconds) == (2, pytest.approx(0.1))
    assert total.mean_cost == {"resize": pytest.approx(0.05)}
    assert store.records(restarts_since=0.0).restarts == {}, "no process of the job's ended"


def test_a_claimed_pause_is_no_longer_than_the_move(store, agent, report, seen, epoch):
    store.sync_jobs([seen(7)])
    move = store.plan_move(7, 0, "resize", SMALL, LARGE, "x", epoch)
    advance(store, epoch, move, Step.DRAINING, Step.CHECKPOINTED)
    times = {"launched_at": 1.0, "imported_at": 2.0, "first_step_at": time.time()}
    agent(7).publish(report(resized=move.id, resize_cost=1e9, times=times))
    advance(store, epoch, move, Step.CONFIGURED, Step.TRAINING)
    (cost,) = store.move_costs(7)
    assert cost["total_s"] < 60


def test_moves_that_companions_name_and_those_that_went_wrong_are_found(store, seen, epoch):
    store.sync_jobs([seen(7), seen(8, restart_count=1)])
    done = store.plan_move(7, 0, "resize", SMALL, LARGE, "x", epoch)
    advance(store, epoch, done, Step.RECRUITING, Step.CONFIGURED, Step.STARTED, Step.TRAINING)
    broken = store.plan_move(7, 0, "resize", LARGE, SMALL, "x", epoch)
    advance(store, epoch, broken, Step.DRAINING, Step.FAILED)
    unbegun = store.plan_move(7, 0, "resize", LARGE, SMALL, "x", epoch)
    advance(store, epoch, unbegun, Step.FAILED)
    earlier = store.plan_move(8, 0, "resize", SMALL, LARGE, "x", epoch)
    advance(store, epoch, earlier, Step.RECRUITING, Step.FAILED)
    queued = store.plan_move(8, 1, "requeue", SMALL, LARGE, "x", epoch)
    advance(store, epoch, queued, Step.DRAINING, Step.FAILED)
    assert set(store.resizes([])) == {broken.id}
    assert set(store.resizes([done.id, queued.id, 10**9])) == {done.id, broken.id}
    assert store.resizes([done.id])[done.id].step is Step.TRAINING
