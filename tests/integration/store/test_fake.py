"""The database in memory follows the same rules for moves as Postgres.

The same calls give the same answers on `polluxd.store.fake` and on the real database.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from sqlalchemy import Engine, event

from polluxd.errors import LeaderLost, StoreError
from polluxd.model import NO_PLACEMENT, Placement, Step
from polluxd.store import CycleRecords
from polluxd.store.fake import FakeRows
from tests.troubled_store import TroubledStore

pytestmark = pytest.mark.slurm

HERE, THERE = Placement(("n1",), 2), Placement(("n1", "n2"), 4)
PATHS = {
    "start": (NO_PLACEMENT, HERE),
    "requeue": (HERE, THERE),
    "park": (HERE, NO_PLACEMENT),
    "resize": (HERE, THERE),
}


def answer(store: Any, name: str, *args: object, **words: object) -> object:
    try:
        given = getattr(store, name)(*args, **words)
    except (StoreError, LeaderLost) as error:
        return type(error)
    if isinstance(given, CycleRecords):
        moves = [(m.job_id, m.path, m.step, m.times) for m in given.moves]
        most = {job: (times.most_gpus, times.most_nodes) for job, times in given.times.items()}
        return moves, most, given.reports, given.pins, given.restarts, given.settings
    return None if name == "plan_move" else given


@pytest.fixture
def both(store: Any) -> tuple[tuple[Any, int], ...]:
    """The real store and the fake one, with the epochs that they lead under."""
    fake = TroubledStore(FakeRows(lambda: 50.0))
    return (store, store.lead()), (fake, fake.lead())


def known(store: Any) -> CycleRecords:
    """All that the store holds, as a decision reads it."""
    return store.records(restarts_since=0.0)


def test_moves_in_any_order(store, seen, epoch):
    rows = FakeRows(lambda: 0.0)
    rows.epoch = epoch - 1
    fake = TroubledStore(rows)
    assert fake.lead() == epoch
    for each in (store, fake):
        each.sync_jobs([seen(job_id) for job_id in (1, 2, 3)])
    chance = random.Random(1)
    for number in range(250):
        job_id = chance.choice((1, 2, 3))
        at = 1000.0 + number
        said = chance.choice((epoch, epoch, epoch, epoch - 1))
        kind = chance.random()
        if kind < 0.3:
            path = chance.choice(list(PATHS))
            source, target = PATHS[path]
            call = ("plan_move", (job_id, 0, path, source, target, "why", said), {"at": at})
        elif kind < 0.35:
            call = ("records", (), {"restarts_since": at - 50.0})
        else:
            step = chance.choice(list(Step))
            which = chance.randint(1, max(1, len(rows.moves)))
            if not rows.moves:
                continue
            ends = chance.choice((None, at + 60.0))
            call = ("advance", (which, step, at), {"epoch": said, "detail": str(number), "ends_at": ends})
        name, args, words = call
        real = list(args)
        if name == "advance":
            real[0] = store.moves()[args[0] - 1].id  # the real ids are the whole database's
        assert answer(store, name, *real, **words) == answer(fake, name, *args, **words), call
    told = [
        [(m.job_id, m.path, m.step, m.times, m.detail, m.ends_at) for m in s.moves()] for s in (store, fake)
    ]
    assert told[0] == told[1]
    assert {m.step for m in rows.moves} >= {Step.FAILED, Step.TRAINING, Step.PARKED}


@pytest.mark.parametrize(
    ("path", "source", "target", "step"),
    [
        ("requeue", HERE, THERE, Step.REQUEUED),
        ("start", NO_PLACEMENT, HERE, Step.CONFIGURED),
        ("resize", THERE, HERE, Step.CHECKPOINTED),
        ("resize", HERE, THERE, Step.STARTED),
    ],
)
def test_a_move_that_is_too_late_to_take_back_goes_on_and_nothing_is_noted(
    both, store, path, source, target, step
):
    for each, leader in both:
        move = each.plan_move(7, 0, path, source, target, "why", leader, at=1.0)
        assert each.advance(move.id, step, 2.0, epoch=leader)
        late = each.cancel_move(7, "ann@host")
        assert (late.step, late.revocable) == (step, False)
        assert [m.cancelled_by for m in each.open_moves()] == [""]
    assert store.setting_audit() == []


def test_moves_within_allocations_are_found_alike(both, seen):
    (store, _), (fake, _) = both
    for each, leader in both:
        each.sync_jobs([seen(7, restart_count=1), seen(8)])
        for job_id, attempt, path, begun in (
            (7, 0, "resize", Step.DRAINING),
            (7, 1, "resize", Step.DRAINING),
            (7, 1, "resize", None),
            (8, 0, "resize", Step.RECRUITING),
            (8, 0, "requeue", Step.DRAINING),
        ):
            move = each.plan_move(job_id, attempt, path, THERE, HERE, "why", leader, at=1.0)
            for step in (begun, Step.FAILED):
                assert step is None or each.advance(move.id, step, 2.0, epoch=leader)

    def found(each: Any, *which: int) -> list[tuple[int, int, str]]:
        ids = [each.moves()[i].id for i in which]
        return [(m.job_id, m.attempt, m.path) for m in each.resizes(ids).values()]

    for which in ((), (0,), (2, 4)):
        assert found(store, *which) == found(fake, *which), which
    assert found(store) == [(7, 1, "resize"), (8, 0, "resize")]
    assert known(store).restarts == known(fake).restarts == {"alice": 1}


def test_a_move_taken_back_and_pins(store, seen, epoch):
    store.sync_jobs([seen(7)])
    assert store.cancel_move(7, "ann@host") is None
    move = store.plan_move(7, 0, "requeue", HERE, THERE, "why", epoch)
    assert store.cancel_move(7, "ann@host").step is Step.PLANNED
    assert [m.cancelled_by for m in store.open_moves()] == ["ann@host"]
    assert store.set_pin(7, "ann@host", pinned=True)
    assert store.set_pin(7, "bob@host", pinned=True)  # already: nothing new to audit
    assert known(store).pins == {7: "pinned by ann@host"}
    assert store.set_pin(7, "ann@host", pinned=False)
    assert known(store).pins == {}
    assert not store.set_pin(8, "ann@host", pinned=True)
    assert [(c.who, c.name, c.to_value) for c in store.setting_audit()] == [
        ("ann@host", "pin of job 7", False),
        ("ann@host", "pin of job 7", True),
        ("ann@host", f"move {move.id} of job 7", "cancelled"),
    ]


def test_what_a_cycle_reads_is_of_one_moment(store, new_store, seen):
    """A move that is written between two queries is in none of their answers."""
    store.sync_jobs([seen(7), seen(8)])
    writer = new_store()
    epoch = writer.lead()
    writer.plan_move(7, 0, "requeue", HERE, THERE, "before", epoch)
    late: list[str] = []

    def write(_connection, _cursor, statement, *_others):
        if "pollux.report_history" in statement and not late:
            late.append(statement)
            writer.plan_move(8, 0, "requeue", HERE, THERE, "between", epoch)

    event.listen(Engine, "before_cursor_execute", write)
    try:
        found = known(store)
    finally:
        event.remove(Engine, "before_cursor_execute", write)
    assert late
    assert ([move.reason for move in found.moves], found.restarts) == (["before"], {"alice": 1})
    assert [move.reason for move in known(store).moves] == ["before", "between"]


def test_what_slurm_forgets_and_what_moves_have_cost(both, seen):
    found = []
    for each, leader in both:
        other = seen(8, gpus_per_node_held={})
        for attempt, held in enumerate(({}, {"n1": 4, "n2": 4}, {"n1": 2}, {})):
            job = seen(7, restart_count=attempt, gpus_per_node_held=held, submit_time=0.0)
            each.sync_jobs([job, other])
        for path, begun, ended in (("requeue", 10.0, 25.0), ("resize", 40.0, 43.0), ("start", 60.0, 90.0)):
            move = each.plan_move(7, 0, path, *PATHS[path], "why", leader, at=begun - 1.0)
            step = Step.CONFIGURED if path == "start" else Step.DRAINING
            assert each.advance(move.id, step, begun, epoch=leader)
            assert each.advance(move.id, Step.TRAINING, ended, epoch=leader)
        records = known(each)
        times = {j: (t.held_at is None, t.most_gpus, t.most_nodes) for j, t in records.times.items()}
        found.append((times, records.totals))
    assert found[0] == found[1]
    assert found[0][0] == {7: (False, 8, 2), 8: (True, 0, 0)}
    assert found[0][1][7].mean_cost == {"requeue": 15.0, "resize": 3.0}
