"""Carrying moves out: a refusal for one job concerns that job alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pollux.goodput import BatchLimits
from polluxd.apply.headroom import Headroom
from polluxd.apply.machine import Fail
from polluxd.apply.paths import Intent
from polluxd.apply.reconciler import Reconciler
from polluxd.apply.refusals import LONGEST_S
from polluxd.config.settings import MoveSettings, PolicySettings
from polluxd.errors import SlurmRefused
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Move, Node, Placement, Report, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import ClusterState, Geometry
from polluxd.store import CycleRecords
from polluxd.store.fake import FakeRows, FakeStore


class MemoryStore:
    """Moves in memory."""

    def __init__(self, *moves: Move) -> None:
        self.moves = list(moves)
        self.reached: list[tuple[int, Step]] = []

    def records(self) -> CycleRecords:
        return CycleRecords(moves=self.moves)

    def resizes(self, ids: Sequence[int]) -> dict[int, Move]:
        return {}

    def advance(self, number: int, step: Step, at: float, **more: Any) -> bool:
        self.reached.append((number, step))
        return True


def reconciler(
    slurm: FakeSlurm, store: Any, *, cooldown: float = 0.0, restarts_per_hour: int = 0, per_user: int = 0
) -> Reconciler:
    return Reconciler(
        slurm,
        store,
        limits=MoveSettings(
            cooldown_s=cooldown, restarts_per_hour=restarts_per_hour, user_restarts_per_hour=per_user
        ),
        lease=300.0,
        authorize=lambda: 1,
        clock=slurm.clock,
        monotonic=slurm.clock,
    )


def turn(acting: Reconciler, slurm: FakeSlurm, store: Any, *, paused: bool = False) -> None:
    records = replace(store.records(), reports={}, settings=PolicySettings(paused=paused))
    acting.tick(acting.gather(slurm.observe()), records)


def running(slurm: FakeSlurm, node: str) -> int:
    job_id = slurm.submit(JobSpec())
    slurm.configure(job_id, Geometry((node,), 1, 1), start=True)
    slurm.advance(5.0)
    return job_id


def move(slurm: FakeSlurm, job_id: int, source: str, step: Step) -> Move:
    times = {Step.PLANNED: slurm.clock() - 1, step: slurm.clock() - 0.5}
    return Move(
        job_id, job_id, 0, "requeue", Placement((source,), 1), Placement((source,), 2), "", step, times
    )


def test_a_refused_requeue_fails_its_move_and_the_others_go_on() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8), Node("n2", 4, cpus=8)])
    first, second = running(slurm, "n1"), running(slurm, "n2")
    store = MemoryStore(
        move(slurm, first, "n1", Step.CHECKPOINTED), move(slurm, second, "n2", Step.CHECKPOINTED)
    )
    slurm.fail("requeue", SlurmRefused("Requested operation is presently disabled"))
    turn(reconciler(slurm, store), slurm, store)
    assert store.reached == [(first, Step.FAILED)]
    slurm.advance(5.0)
    assert [slurm.jobs([j])[j].restart_count for j in (first, second)] == [0, 1]


def test_a_refused_renewal_stops_no_move_and_is_not_repeated_at_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id = running(slurm, "n1")
    slurm.submit(JobSpec())
    store = MemoryStore(move(slurm, job_id, "n1", Step.PLANNED))
    slurm.fail("renew", SlurmRefused("Access denied"), times=2)
    acting = reconciler(slurm, store)
    turn(acting, slurm, store)
    assert store.reached == [(job_id, Step.DRAINING)]
    slurm.advance(99.0)
    turn(acting, slurm, store)
    assert renewals(slurm) == 1
    slurm.advance(2.0)  # a third of the lease of 300 s has passed
    turn(acting, slurm, store)
    assert renewals(slurm) == 2


def renewals(slurm: FakeSlurm) -> int:
    return sum(call == "renew" for call, *_ in slurm.calls)


def test_leases_of_many_jobs_are_renewed_in_bounded_calls() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    waiting = {slurm.submit(JobSpec(), lease=300) for _ in range(600)}
    calls = noted_renewals(slurm)
    store = MemoryStore()
    acting = reconciler(slurm, store)
    for turns in (1, 2, 3):
        turn(acting, slurm, store)
        assert len(calls) == turns, "moves do not wait for the renewal of all"
    turn(acting, slurm, store)
    assert [len(job_ids) for job_ids, _ in calls] == [250, 250, 100]
    assert {job_id for job_ids, _ in calls for job_id in job_ids} == waiting


def test_leases_that_are_about_to_end_are_renewed_at_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    for _ in range(600):
        slurm.submit(JobSpec(), lease=60)
    calls = noted_renewals(slurm)
    turn(reconciler(slurm, MemoryStore()), slurm, MemoryStore())
    assert [len(job_ids) for job_ids, _ in calls] == [250, 250, 100]


def test_many_waiting_jobs_have_longer_leases_and_few_renewals() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    for _ in range(3000):
        slurm.submit(JobSpec(), lease=60)
    calls = noted_renewals(slurm)
    store = MemoryStore()
    acting = reconciler(slurm, store)
    now = slurm.clock()
    turn(acting, slurm, store)
    assert {until for _, until in calls} == {now + 600}
    slurm.advance(199.0)
    turn(acting, slurm, store)
    assert len(calls) == 12
    slurm.advance(2.0)
    turn(acting, slurm, store)
    assert len(calls) == 13, "15 renewals a second"


def noted_renewals(slurm: FakeSlurm) -> list[tuple[list[int], float]]:
    """The jobs and the end of each call that follows."""
    calls: list[tuple[list[int], float]] = []
    renew = slurm.renew
    slurm.renew = lambda job_ids, until: (calls.append((list(job_ids), until)), renew(job_ids, until))[1]  # type: ignore[method-assign]
    return calls


def planned(slurm: FakeSlurm, job_id: int, **more: Any) -> Move:
    now = {Step.PLANNED: slurm.clock()}
    return Move(
        job_id,
        job_id,
        0,
        "requeue",
        Placement(("n1",), 1),
        Placement(("n1",), 2),
        "",
        Step.PLANNED,
        now,
        **more,
    )


def test_a_pause_costs_no_job_a_cooldown_and_a_move_taken_back_one() -> None:
    slurm = FakeSlurm([Node("n1", 8, cpus=8)])
    first, second = running(slurm, "n1"), running(slurm, "n1")
    store = MemoryStore(planned(slurm, first))
    acting = reconciler(slurm, store, cooldown=60.0)
    turn(acting, slurm, store, paused=True)
    assert store.reached == [(first, Step.FAILED)]
    assert acting.past.cooldown(first) == 0.0
    store.moves = [planned(slurm, second, cancelled_by="ann@host")]
    turn(acting, slurm, store)
    assert store.reached[1:] == [(second, Step.FAILED)]
    assert acting.past.cooldown(second) == 60.0


def test_a_job_that_started_within_seconds_rests_for_seconds() -> None:
    slurm = FakeSlurm([Node("n1", 8, cpus=8)])
    started = running(slurm, "n1")
    one = replace(move(slurm, started, "n1", Step.STARTED), path="start", target=Placement(("n1",), 1))
    acting = reconciler(slurm, MemoryStore(one), cooldown=60.0)
    slurm.advance(3.0)
    now = slurm.clock()
    trains = Report(attempt=0, at=now, first_step_at=now, limits=BatchLimits(32, 1024, 8, 128))
    acting.tick(acting.gather(slurm.observe()), CycleRecords(moves=[one], reports={started: trains}))
    assert acting.past.cooldown(started) == 4.0, "as long as the start took"


def test_a_wait_counts_from_its_own_step_though_the_clock_was_set_back_before() -> None:
    """A new polluxd ignores an old acknowledgement: the job trained on."""
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id = running(slurm, "n1")
    times = {Step.PLANNED: slurm.clock() + 7200.0, Step.CHECKPOINTED: slurm.clock() - 150.0}
    store = MemoryStore(replace(move(slurm, job_id, "n1", Step.CHECKPOINTED), times=times))
    turn(reconciler(slurm, store), slurm, store)
    assert store.reached == [(job_id, Step.FAILED)]
    assert slurm.truth(job_id).restart_count == 0


def restarts(store: FakeStore) -> CycleRecords:
    """What a decision reads."""
    return store.records(restarts_since=store.rows.clock() - 3600.0)


def spent(acting: Reconciler, store: FakeStore, user: str) -> str:
    return acting.rules(acting.gather(ClusterState(0.0, (), ())), restarts(store)).spent(user)


def test_the_restart_budget_holds_running_jobs_back_and_starts_others() -> None:
    slurm = FakeSlurm([Node("n1", 8, cpus=8)])
    store = FakeStore(FakeRows(slurm.clock))
    assert store.lead() == 1
    acting = reconciler(slurm, store, restarts_per_hour=2)
    here, there = Placement(("n1",), 1), Placement(("n1",), 2)
    wished = [Intent(j, 0, "requeue", here, there, "") for j in (1, 2, 3)]
    wished.append(Intent(4, 0, "start", NO_PLACEMENT, here, ""))
    begun = acting.begin(wished, restarts(store))
    assert [m.job_id for m in begun] == [1, 2, 4]
    assert acting.begin(wished[2:3], restarts(store)) == [], (
        "two are planned already, though none was ordered out yet"
    )
    for move_begun in begun[:2]:
        store.advance(move_begun.id, Step.DRAINING, slurm.clock(), epoch=1)
    assert spent(acting, store, "ann") == "the cluster's 2 restarts an hour are used up"
    slurm.advance(10.0)
    assert acting.begin(wished[2:3], replace(restarts(store), moves=[])) == []
    store.rows.moves = [replace(m, times={Step.DRAINING: slurm.clock() - 3700.0}) for m in store.rows.moves]
    assert spent(acting, store, "ann") == ""


def test_one_user_s_restarts_leave_the_cluster_s_budget_to_others() -> None:
    slurm = FakeSlurm([Node("n1", 8, cpus=8)])
    store = FakeStore(FakeRows(slurm.clock))
    assert store.lead() == 1
    first = [slurm.submit(JobSpec()) for _ in range(4)]
    store.sync_jobs([replace(job, user="mallory") for job in slurm.observe().jobs])
    acting = reconciler(slurm, store, restarts_per_hour=10, per_user=2)
    here, there = Placement(("n1",), 1), Placement(("n1",), 2)
    wished = [Intent(j, 0, "requeue", here, there, "", "mallory") for j in first]
    wished.append(Intent(99, 0, "requeue", here, there, "", "ann"))
    begun = acting.begin(wished, restarts(store))
    assert [m.job_id for m in begun] == [*first[:2], 99]
    assert spent(acting, store, "mallory") == "the 2 restarts an hour of user mallory are used up"
    assert spent(acting, store, "ann") == ""
    assert acting.begin(wished[2:3], restarts(store)) == []


@pytest.mark.parametrize(("continues", "limit"), [(False, 3000.0), (True, 3600.0)])
def test_a_requeued_job_keeps_what_was_left_of_its_time_limit(continues: bool, limit: float) -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    store = FakeStore(FakeRows(slurm.clock))
    assert store.lead() == 1
    job_id = slurm.submit(JobSpec(continues=continues), time_limit_s=3600.0)
    slurm.configure(job_id, Geometry(("n1",), 1, 1), start=True)
    slurm.advance(601.0)
    acting = reconciler(slurm, store)
    acting.begin(
        [Intent(job_id, 0, "requeue", Placement(("n1",), 1), Placement(("n1",), 2), "")], CycleRecords()
    )
    for _ in range(12):
        turn(acting, slurm, store)
        store.rows.acknowledge(1, slurm.clock())
        slurm.advance(0.5)
    now = slurm.truth(job_id)
    assert (now.restart_count, now.gpus_per_node_held) == (1, {"n1": 2})
    assert now.time_limit_s == limit


@pytest.mark.parametrize("between", [7.0, 25.0, 40.0])
def test_moves_do_not_lengthen_a_time_limit(between: float) -> None:
    """Over all attempts a job runs at most one minute beyond its limit."""
    limit = 600.0
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    store = FakeStore(FakeRows(slurm.clock))
    assert store.lead() == 1
    job_id = slurm.submit(JobSpec(), time_limit_s=limit)
    slurm.configure(job_id, Geometry(("n1",), 1, 1), start=True)
    acting = reconciler(slurm, store)
    slurm.advance(1.0)
    ran, moved, begun = 0.0, 0, slurm.clock()
    while not slurm.truth(job_id).state.finished:
        now = slurm.truth(job_id)
        if now.state is JobState.RUNNING and now.start_time is not None:
            ran += 0.5
            if slurm.clock() - now.start_time > between and not store.open_moves():
                size = len(now.nodes) and now.gpus_per_node_held["n1"]
                there = Placement(("n1",), 3 - size)
                wish = Intent(job_id, now.restart_count, "requeue", Placement(("n1",), size), there, "")
                acting.begin([wish], CycleRecords())
                moved += 1
        turn(acting, slurm, store)
        for open_move in store.open_moves():
            store.rows.acknowledge(open_move.id, slurm.clock())
            if open_move.step is Step.STARTED:
                store.advance(open_move.id, Step.TRAINING, slurm.clock(), epoch=1)
        slurm.advance(0.5)
        assert slurm.clock() < begun + 3 * limit, "it neither runs nor ends"
        assert ran <= limit + 61.0, f"it runs on after {ran} s and {moved} moves"
    assert moved > 5
    assert ran >= limit - 2.0 * moved - 1.0, "a requeue may cost a second or two"


def test_what_is_remembered_of_jobs_that_are_gone_is_forgotten() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    store = MemoryStore(planned(slurm, 99))
    acting = reconciler(slurm, store, cooldown=60.0)
    turn(acting, slurm, store)  # no such job: the move fails
    assert acting.past.cooldown(99) > 0.0
    store.moves = []
    turn(acting, slurm, store)
    assert acting.past.cooldown(99) == 0.0


def test_a_job_that_slurm_ends_in_the_second_of_its_start_is_queued_again_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)], exit_s=0.05, start_s=0.0)
    store = FakeStore(FakeRows(slurm.clock))
    assert store.lead() == 1
    job_id = running(slurm, "n1")
    acting = reconciler(slurm, store)
    acting.begin(
        [Intent(job_id, 0, "requeue", Placement(("n1",), 1), Placement(("n1",), 2), "")], CycleRecords()
    )
    for step in (Step.DRAINING, Step.CHECKPOINTED):
        store.advance(1, step, slurm.clock(), epoch=1)
    slurm.requeue(job_id)
    slurm.advance(0.1)
    store.advance(1, Step.REQUEUED, slurm.clock(), epoch=1)
    # What polluxd itself does not do: start it in the second in which it left.
    slurm.configure(job_id, Geometry(("n1",), 2, 2), start=True)
    store.advance(1, Step.CONFIGURED, slurm.clock(), epoch=1)
    slurm.advance(0.1)
    assert slurm.truth(job_id).raw_state == "FAILED"
    turn(acting, slurm, store)
    now = slurm.truth(job_id)
    assert (now.raw_state, now.restart_count) == ("PENDING", 2)
    assert store.rows.moves[0].step is Step.FAILED
    turn(acting, slurm, store)
    acting.begin([Intent(job_id, 2, "start", NO_PLACEMENT, Placement(("n1",), 2), "")], CycleRecords())
    slurm.advance(1.0)
    turn(acting, slurm, store)
    slurm.advance(1.0)
    assert slurm.truth(job_id).gpus_per_node_held == {"n1": 2}


def requeued(slurm: FakeSlurm) -> tuple[int, MemoryStore]:
    """A job back in the queue, and its move."""
    job_id = slurm.submit(JobSpec())
    return job_id, MemoryStore(move(slurm, job_id, "n1", Step.REQUEUED))


def test_an_update_that_slurm_applied_and_then_refused_counts_as_done() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id, store = requeued(slurm)
    acting = reconciler(slurm, store)
    seen = acting.gather(slurm.observe())
    slurm.configure(job_id, Geometry(("n1",), 2, 2), start=True)  # an update that timed out goes through now
    slurm.advance(5.0)
    slurm.fail("configure", SlurmRefused("Job is no longer pending execution"))
    acting.tick(seen, store.records())
    assert store.reached == [(job_id, Step.CONFIGURED)]


def test_a_refused_size_fails_the_move_and_is_not_asked_for_again_at_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id, store = requeued(slurm)
    slurm.fail("configure", SlurmRefused("Requested node configuration is not available"))
    acting = reconciler(slurm, store)
    turn(acting, slurm, store)
    assert store.reached == [(job_id, Step.FAILED)]
    eligible = acting.eligibility(slurm.observe(), Headroom())[job_id]
    assert (eligible.nodes, "configuration is not available" in eligible.rule) == (frozenset(), True)
    assert not acting.refusals.note(), "one job's trouble is none of the cluster's"
    slurm.advance(61.0)
    assert job_id not in acting.eligibility(slurm.observe(), Headroom())


def test_a_waiting_job_whose_start_failed_may_start_elsewhere_at_once() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8)])
    job_id = slurm.submit(JobSpec(), lease=1e6)
    start = Move(1, job_id, 0, "start", NO_PLACEMENT, Placement(("n1",), 3), "", Step.CONFIGURED, {})
    store = MemoryStore(start)
    acting = reconciler(slurm, store, cooldown=60.0)
    turn(acting, slurm, store)
    slurm.advance(31.0)
    turn(acting, slurm, store)
    assert store.reached == [(start.id, Step.FAILED)]
    store.moves = []
    turn(acting, slurm, store)
    assert not acting.occupied(job_id)
    assert acting.past.cooldown(job_id) == 0.0


def test_a_size_that_no_node_could_hold_is_not_tried_again() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8, memory_mb=1000)])
    job_id = slurm.submit(JobSpec(mem_per_gpu_mb=400))
    start = Move(1, job_id, 0, "start", NO_PLACEMENT, Placement(("n1",), 3), "", Step.PLANNED, {})
    store = MemoryStore(start)
    acting = reconciler(slurm, store)
    turn(acting, slurm, store)
    store.moves = [replace(start, step=Step.CONFIGURED)]
    turn(acting, slurm, store)
    slurm.advance(5.0)
    turn(acting, slurm, store)
    assert store.reached == [(job_id, Step.CONFIGURED), (job_id, Step.FAILED)]
    assert slurm.calls[-2:] == [("renew", job_id), ("release", job_id)], (
        "kept back, then with a priority again"
    )
    slurm_job = slurm.truth(job_id)
    most, rule = acting.refusals.lowered(Headroom()).most[job_id]
    assert (most, "BadConstraints" in rule) == (2, True)
    assert "the size of job 1" in acting.refusals.note()
    slurm.finish(job_id)
    store.moves = []
    turn(acting, slurm, store)
    assert not acting.refusals.note(), "nothing is stuck any more"
    acting.refusals.look(replace(start, step=Step.CONFIGURED), slurm_job, Fail("x"))
    slurm.advance(LONGEST_S)
    assert not acting.refusals.lowered(Headroom()).most, "the site may have changed since"


def test_a_waiting_job_gets_the_size_back_that_its_user_wrote() -> None:
    slurm = FakeSlurm([Node("n1", 4, cpus=8), Node("n2", 4, cpus=8)])
    fresh = slurm.submit(JobSpec(), lease=1e6)
    job_id = slurm.submit(JobSpec(cpus_per_gpu=2), nodes=1, gpus_per_node=1, lease=1e6)
    start = Move(1, job_id, 0, "start", NO_PLACEMENT, Placement(("n1",), 3), "", Step.PLANNED, {})
    store = MemoryStore(start)
    acting = reconciler(slurm, store)
    turn(acting, slurm, store)
    assert slurm.truth(job_id).requested_gpus_per_node == 3
    store.moves = []
    slurm.advance(5.0)
    assert slurm.truth(job_id).nodes == ("n1",)
    slurm.set_schedulable("n1", False)
    slurm.requeue_by_hand(job_id)
    slurm.advance(5.0)
    turn(acting, slurm, store)
    turn(acting, slurm, store)
    assert slurm.calls.count(("configure", job_id)) == 2, "once for each time that it waits again"
    assert ("configure", fresh) not in slurm.calls
    assert slurm.truth(job_id).requested_gpus_per_node == 1
    slurm.advance(400.0)  # nobody renews its lease: polluxd is gone
    assert slurm.truth(job_id).nodes == ("n2",)
