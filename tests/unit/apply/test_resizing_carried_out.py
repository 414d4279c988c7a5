"""Moves within the allocation, over a Slurm that may refuse or be mute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from polluxd.apply.paths import Intent
from polluxd.apply.reconciler import Reconciler
from polluxd.config.settings import MoveSettings
from polluxd.errors import SlurmRefused
from polluxd.model import JobSpec, JobState, Placement, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import Companion, Geometry
from polluxd.store import CycleRecords
from polluxd.store.fake import FakeRows, FakeStore

from .resized_job import BOTH, NODES, ONE, says


class Site:
    """One job on n1 and n2, and polluxd's reconciler over the fakes."""

    def __init__(self, **limits: Any) -> None:
        self.slurm = FakeSlurm(NODES)
        self.store = FakeStore(FakeRows(self.slurm.clock))
        assert self.store.lead() == 1
        self.job = self.slurm.submit(JobSpec(cpus_per_gpu=3, mem_per_gpu_mb=100), time_limit_s=3600.0)
        self.acting = Reconciler(
            self.slurm,
            self.store,  # type: ignore[arg-type]
            limits=MoveSettings(cooldown_s=60.0, **limits),
            lease=300.0,
            authorize=lambda: 1,
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
        )
        self.report = says()

    def start(self, at: Placement) -> None:
        self.slurm.configure(self.job, Geometry(at.nodes, at.gpus_per_node, 1), start=True)
        self.slurm.advance(2.0)
        self.store.sync_jobs(self.slurm.observe().jobs)

    def begin(self, source: Placement, target: Placement) -> None:
        assert self.acting.begin([Intent(self.job, 0, "resize", source, target, "")], CycleRecords())

    def turn(self, seconds: float = 4.0) -> int:
        seen = self.acting.gather(self.slurm.observe())
        records = replace(self.store.records(), reports={self.job: self.report})
        left = self.acting.tick(seen, records)
        self.slurm.advance(seconds)
        return left

    @property
    def steps(self) -> list[Step]:
        return [found.step for found in self.store.rows.moves]

    def lend(self, number: int, **more: Any) -> int:
        nonces = {found.id: found.nonce for found in self.store.rows.moves}
        claim = Companion(self.job, 0, number, nonces.get(number, "f" * 32))
        return self.slurm.submit(JobSpec(), companion=claim, time_limit_s=86400.0, **more)


def test_a_companion_gets_its_parents_share_and_no_more_time_than_it_has_left() -> None:
    site = Site(restarts_per_hour=1)
    site.start(ONE)
    site.slurm.advance(600.0)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.turn()
    shown = site.slurm.truth(lent)
    assert shown.gpus_per_node_held == {"n2": 4}
    assert (shown.cpus_per_node_held, site.slurm.memory_per_node(lent)) == ({"n2": 12}, 400)
    assert shown.time_limit_s == 3000.0
    for _ in range(2):
        site.turn()
    assert site.steps == [Step.STARTED]
    site.report = says(resized=1)
    site.turn()
    assert site.steps == [Step.TRAINING]
    seen = site.acting.gather(site.slurm.observe())
    assert [j.gpus_per_node_held for j in seen.state.jobs] == [{"n1": 4, "n2": 4}]
    assert site.turn() == 0
    assert site.slurm.truth(lent).state is JobState.RUNNING
    assert site.store.records(restarts_since=0.0).restarts == {}, "nobody was restarted"
    assert site.acting.past.cooldown(site.job) == 0.0, "it may be resized again at once"


def test_a_plan_made_before_a_move_ended_does_not_move_its_job_again() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    site.lend(1)
    for _ in range(3):
        site.turn()
    site.report = says(resized=1)
    site.turn()
    assert site.steps == [Step.TRAINING]
    stale = Intent(site.job, 0, "resize", ONE, BOTH, "")
    assert site.acting.begin([stale], CycleRecords()) == [], "this plan still saw the job on one node"
    site.turn()
    assert site.acting.begin([Intent(site.job, 0, "resize", BOTH, ONE, "")], CycleRecords())


def test_a_move_waits_while_a_node_of_it_boots_and_its_limits_begin_after_that() -> None:
    site = Site(training_timeout_s=100.0)
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    site.lend(1)
    for _ in range(3):
        site.turn()
    assert site.steps == [Step.STARTED]
    observe, boots = site.slurm.observe, True
    site.slurm.observe = lambda: replace(  # type: ignore[method-assign]
        found := observe(),
        nodes=tuple(replace(n, power="booting") if boots and n.name == "n2" else n for n in found.nodes),
    )
    for seconds in (100.0, 100.0, 100.0, 1.0):
        site.turn(seconds)
    assert site.steps == [Step.STARTED]
    boots = False
    site.turn(60.0)
    site.turn(60.0)
    assert site.steps == [Step.STARTED]
    site.turn(60.0)
    assert site.steps == [Step.FAILED]


def test_a_move_whose_node_did_not_boot_says_so() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    for _ in range(3):
        site.turn()
    observe, state = site.slurm.observe, {"power": "booting"}
    site.slurm.observe = lambda: replace(  # type: ignore[method-assign]
        found := observe(),
        nodes=tuple(replace(n, **state) if n.name == "n2" else n for n in found.nodes),  # type: ignore[arg-type]
    )
    site.turn()
    site.slurm.cancel([lent])
    state |= {"power": "off"}
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.store.rows.moves[0].detail.endswith(": n2 did not boot")


def test_a_move_that_fails_ends_its_companion_at_once() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.report = says(refused=1)
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
    assert site.acting.past.cooldown(site.job) > 60.0


def test_a_refused_placing_fails_the_move_and_not_the_job() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    site.slurm.fail("configure", SlurmRefused("Requested node configuration is not available"))
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
    assert site.slurm.truth(site.job).gpus_per_node_held == {"n1": 4}


def test_companions_of_nobody_are_ended_though_a_call_is_refused_first() -> None:
    site = Site()
    site.start(ONE)
    orphans = [site.lend(77), site.slurm.submit(JobSpec(), companion=Companion(99, 0, 1))]
    site.slurm.fail("cancel", SlurmRefused("Access denied"))
    assert site.turn(1.0) == 2
    assert site.turn(1.0) == 2, "not asked again so soon"
    site.slurm.advance(4.0)
    site.turn()
    assert [site.slurm.truth(j).raw_state for j in orphans] == ["CANCELLED", "CANCELLED"]
    assert site.turn() == 0


def test_any_number_of_forged_companions_is_ended_in_bounded_calls() -> None:
    site = Site()
    site.start(ONE)
    forged = [site.lend(77, uid=1001) for _ in range(600)]
    for left in (600, 350, 100, 0):
        assert site.turn(0.5) == left
    assert {site.slurm.truth(j).raw_state for j in forged} == {"CANCELLED"}


def test_nodes_that_a_job_left_in_a_move_that_was_given_up_are_taken_back() -> None:
    site = Site()
    site.start(BOTH)
    site.begin(BOTH, ONE)
    site.turn()
    site.turn(40.0)  # no word from the agent
    site.turn()
    assert site.steps == [Step.FAILED]
    assert site.slurm.truth(site.job).nodes == ("n1", "n2")
    site.report = says(resized=1)
    site.turn()
    assert site.slurm.truth(site.job).nodes == ("n1",)
    assert site.steps == [Step.FAILED]


def test_where_slurm_does_not_take_them_back_the_job_goes_through_the_queue() -> None:
    site = Site()
    site.start(BOTH)
    site.begin(BOTH, ONE)
    site.turn()
    site.store.rows.acknowledge(1, site.slurm.clock())
    site.report = says(resized=1, first_step_at=1.0, checkpointed=True)
    site.slurm.fail("shrink", SlurmRefused("Operation not permitted"), times=2)
    site.turn()
    assert site.steps == [Step.FAILED]
    site.turn()
    assert site.steps == [Step.FAILED, Step.PLANNED]
    requeue = site.store.rows.moves[1]
    assert (requeue.path, requeue.source, requeue.target) == ("requeue", BOTH, ONE)


def test_a_requeue_ends_the_companions_first() -> None:
    site = Site()
    site.start(ONE)
    site.begin(ONE, BOTH)
    site.turn()
    lent = site.lend(1)
    for _ in range(3):
        site.turn()
    site.report = says(resized=1)
    site.turn()
    assert site.steps == [Step.TRAINING]
    site.turn()
    elsewhere = Placement(("n3",), 4)
    assert site.acting.begin([Intent(site.job, 0, "requeue", BOTH, elsewhere, "")], CycleRecords())
    site.turn()
    site.store.rows.acknowledge(2, site.slurm.clock())
    site.slurm.calls.clear()
    site.turn()
    assert [call for call in site.slurm.calls if call[0] in ("cancel", "requeue")] == [
        ("cancel", lent),
        ("requeue", site.job),
    ]
    for _ in range(3):
        site.turn()
    assert site.slurm.truth(site.job).gpus_per_node_held == {"n3": 4}
    assert site.slurm.truth(lent).raw_state == "CANCELLED"
