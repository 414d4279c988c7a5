"""What an attempt can store and read, by the gateway's statements."""

from __future__ import annotations

import hashlib
import time

import pytest

from polluxd.gateway.records import Holder
from polluxd.model import NO_PLACEMENT, JobState, Placement, Step
from tests.integration.gateway.serving import token_of
from tests.integration.store.conftest import RefusedByStore

pytestmark = pytest.mark.slurm

N1 = Placement(("n1",), 4)
N2 = Placement(("n2",), 4)
NOTHING = {"drain": None, "resize": None}


def refused(call, *args, **words):
    with pytest.raises(RefusedByStore) as caught:
        call(*args, **words)
    return str(caught.value)


def test_a_report_arrives_as_it_was_sent(store, agent, seen, report):
    store.sync_jobs([seen(7)])
    body = report(times={"first_step_at": 1000.5})
    assert agent(7).publish(body) == NOTHING
    got = store.reports()[7]
    assert (got.attempt, got.batch_size, got.goodput, got.target) == (0, 128, 90.0, 500.0)
    assert got.at == pytest.approx(body["at"], abs=60)
    assert got.params.gamma == 1.5
    assert got.noise.phi(32) == 96.0
    assert (got.limits.initial, got.limits.local_max) == (32, 256)
    assert got.first_step_at == 1000.5
    assert got.local_max_by_type == {}


def test_a_bound_by_memory_arrives_by_gpu_type(store, agent, report):
    agent(7).publish(report(gpu_type="v100", local_max_by_type={"": 512, "v100": 16}))
    got = store.reports()[7]
    assert [got.limits_on(kind).local_max for kind in ("a100", "v100", "")] == [512, 256, 256]


def test_unmeasured_terms_stay_unknown(store, agent, report):
    agent(7).publish(report(params=None, noise=None, target=None))
    got = store.reports()[7]
    assert (got.params, got.noise, got.target, got.first_step_at) == (None, None, None, None)


def test_an_attempt_that_is_over_is_refused_by_slurms_own_word(store, agent, seen):
    agent(7).publish()
    store.sync_jobs([seen(7, restart_count=1)])
    old = agent(7)
    for call in (old.publish, lambda: old.acknowledge(1), lambda: old.prior("ab" * 16)):
        assert refused(call) == "over"
    agent(7, attempt=1).publish()
    assert store.reports()[7].attempt == 1


def test_the_next_attempt_may_report_before_polluxd_has_seen_it_and_no_later_one(store, agent, seen):
    store.sync_jobs([seen(7)])
    agent(7).publish()
    agent(7, attempt=1).publish()
    assert store.reports()[7].attempt == 0, "no user can have a report of another attempt stand for this one"
    store.sync_jobs([seen(7, restart_count=1)])
    assert store.reports()[7].attempt == 1
    store.sync_jobs([seen(8)])
    for attempt in (2, 3, 2**31 - 2):
        assert refused(agent(8, attempt=attempt).publish) == "unknown"


def test_a_job_that_ended_stores_nothing_in_any_attempt(store, agent, seen):
    store.sync_jobs([seen(7, state=JobState.COMPLETED, end_time=time.time())])
    ended, coming = agent(7), agent(7, attempt=1)
    assert refused(ended.publish) == "over"
    assert refused(coming.publish) == "unknown"
    for job in (ended, coming):
        refused(job.prior, "ab" * 16)
        refused(job.acknowledge, 1)
    assert store.report_history(7) == []


def test_a_user_writes_nothing_for_another_users_job(store, agent, seen, epoch):
    store.sync_jobs([seen(7, uid=1000)])
    move = store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    thief = agent(7, uid=1001)
    for call in (thief.publish, lambda: thief.acknowledge(move.id), lambda: thief.prior("ab" * 16)):
        assert refused(call) == "unknown"
    assert store.reports() == {}
    assert agent(7, uid=1000).instructions()["drain"] == move.id


def test_a_job_that_polluxd_has_not_seen_may_try_again(store, agent, cluster, postgres):
    early = agent(7)
    postgres.execute(f"DELETE FROM pollux.job WHERE cluster = '{cluster}'")
    assert refused(early.publish) == "unknown"


def test_a_report_wakes_polluxd_when_its_news_change(store, agent, report, postgres, cluster):
    job = agent(7)
    for _ in range(2):
        job.publish(report(times={"first_step_at": None}))
    for _ in range(2):
        job.publish(report(times={"first_step_at": 100.0}, resized=None))
    job.publish(report(times={"first_step_at": 100}, resized=4))
    for _ in range(2):
        job.publish(report(times={"first_step_at": 100}, resized=4, resize_refused={"id": 5, "why": "no"}))
    rows = postgres.execute(
        f"SELECT wakes FROM pollux.report_history WHERE cluster = '{cluster}' ORDER BY id"
    )
    assert [wakes for (wakes,) in rows] == [False, False, True, False, True, True, False]


def test_a_drain_is_for_the_attempt_that_it_is_meant_for(store, agent, epoch):
    before, after = agent(7), agent(7, attempt=1)
    move = store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    assert before.instructions() == NOTHING
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    assert before.instructions() == {"drain": move.id, "resize": None}
    assert after.instructions() == NOTHING
    assert agent(8).instructions() == NOTHING


def test_an_acknowledgement_counts_once_and_may_be_repeated(store, agent, epoch):
    job = agent(7)
    job.publish()
    move = store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    assert job.acknowledge(move.id) is False  # nobody has asked yet
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    assert agent(8).acknowledge(move.id) is False
    assert job.acknowledge(move.id, last_step_at=time.time(), checkpoint_s=0.25, step=12) is True
    assert store.open_moves()[0].step is Step.DRAINING  # polluxd alone changes its tables
    store.take_in()
    (open_move,) = store.open_moves()
    assert open_move.step is Step.CHECKPOINTED
    at = open_move.times[Step.CHECKPOINTED]
    assert store.reports()[7].checkpointed
    assert job.acknowledge(move.id) is True  # the first answer was lost
    store.take_in()
    assert store.open_moves()[0].times[Step.CHECKPOINTED] == at
    store.advance(move.id, Step.FAILED, time.time(), epoch=epoch)
    assert job.acknowledge(move.id) is False


def test_a_report_after_the_others_is_the_latest(store, agent, report):
    job = agent(7)
    for size in (32, 64, 128):
        job.publish(report(batch_size=size))
    assert [p.batch_size for p in store.report_history(7)] == [32, 64, 128]
    assert store.reports()[7].batch_size == 128


def test_a_first_step_and_an_acknowledgement_end_a_wait_when_a_move_is_under_way(
    store, agent, report, seen, epoch
):
    job = agent(7)
    store.sync_jobs([seen(7)])
    stepped = report(times={"first_step_at": time.time()})
    job.publish(stepped)
    assert store.wait(1.2, for_news=True) is False, "no move waits for this step"
    move = store.plan_move(7, 0, "park", N1, NO_PLACEMENT, "park", epoch)
    job.publish(stepped)
    assert store.wait(1.2, for_news=True) is False, "the step was reported before"
    job.publish(report(times={"first_step_at": time.time()}))
    assert store.wait(60, for_news=True) is True
    assert store.wait(1.2, for_news=True) is False
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    job.acknowledge(move.id)
    assert store.wait(1.2, for_news=False) is False
    assert store.wait(60, for_news=True) is True


def digest(text):
    return hashlib.sha256(text.encode()).digest()


def test_a_token_lives_as_long_as_its_attempt(store, records, seen):
    store.sync_jobs([seen(7)])
    token = digest(token_of(records, 7))
    assert records.token_of(token) == (Holder(1000, 7, 0, None), None)
    assert records.token_of(digest("another")) is None
    store.sync_jobs([seen(7, restart_count=1)])
    assert records.token_of(token)[1] == "over"
    later = digest(token_of(records, 7, attempt=1))
    assert records.token_of(later)[1] is None
    store.sync_jobs([seen(7, restart_count=1, state=JobState.COMPLETED, end_time=time.time())])
    assert records.token_of(later)[1] == "over"
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    assert [records.token_of(each) for each in (token, later)] == [None, None]


def test_a_token_does_not_outlive_its_job_under_a_number_that_is_used_again(store, records, seen):
    store.sync_jobs([seen(7, restart_count=1)])
    token = digest(token_of(records, 7, attempt=1))
    store.sync_jobs([seen(7, name="another")])
    assert records.token_of(token) is None


def test_a_users_token_ends_by_its_time(store, records):
    for name, seconds in (("long", 60.0), ("over", -1.0)):
        records.issue(Holder(1000, expires_s=seconds), digest(name))
    holder, refusal = records.token_of(digest("long"))
    assert (holder.uid, holder.job_id, refusal) == (1000, None, None)
    assert 0 < holder.expires_s <= 60
    assert records.token_of(digest("over")) is None


def test_an_attempt_and_a_user_have_eight_tokens(store, records, seen):
    store.sync_jobs([seen(7), seen(8)])
    other = digest(token_of(records, 8))
    mine = [digest(token_of(records, 7)) for _ in range(10)]
    users = [digest(f"user {n}") for n in range(10)]
    for each in users:
        records.issue(Holder(1000, expires_s=60.0), each)
    for tokens in (mine, users):
        assert [records.token_of(each) is not None for each in tokens] == [False] * 2 + [True] * 8
    assert records.token_of(other) is not None


def test_what_polluxd_knows_of_an_attempt(store, records, seen):
    assert records.attempt_of(7, 0) is None
    store.sync_jobs([seen(7, restart_count=1)])
    assert [records.attempt_of(7, n) for n in range(4)] == [
        *((1000, "over"), (1000, None), (1000, None), (1000, "unknown"))
    ]
    store.sync_jobs([seen(7, restart_count=1, state=JobState.FAILED, end_time=time.time())])
    assert [records.attempt_of(7, n) for n in range(4)] == [
        *((1000, "over"), (1000, "over"), (1000, "unknown"), (1000, "unknown"))
    ]
