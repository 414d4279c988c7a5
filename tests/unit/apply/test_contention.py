"""Which waiting jobs stand in Slurm's own queue, and their sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.plain_jobs import Contender, contending, impossible, least_size, unplaced, with_contenders
from polluxd.apply.waiting_jobs import WaitingJobs, kept_back
from polluxd.config.settings import PolicySettings
from polluxd.model import (
    NO_PLACEMENT,
    Allocation,
    JobSpec,
    JobState,
    Node,
    Placement,
    Plan,
    Snapshot,
    SnapshotJob,
)
from polluxd.policy import decide
from polluxd.slurm.demands import Demands
from polluxd.slurm.fake import FakeSlurm
from polluxd.slurm.protocol import ClusterState, Geometry, SlurmJob
from polluxd.slurm.rules import Rules
from tests import build
from tests.build import job as build_job
from tests.build import node, snapshot
from tests.unit.apply.four_nodes import NODES, NOW, RULES, job, ours, plain


def chosen(*jobs: SlurmJob) -> dict[int, Placement]:
    state = ClusterState(NOW, NODES, jobs, rules=RULES)
    return {one.job_id: size for one, size, _ in contending(state, {1})}


def test_a_job_contends_with_plain_jobs_that_come_after_it() -> None:
    assert chosen(ours(priority=200), plain()) == {1: Placement(("n1",), 1)}
    assert chosen(ours(priority=100, submit_time=1.0), plain(submit_time=2.0)) == {1: Placement(("n1",), 1)}
    assert chosen(ours(partition="high"), plain(priority=900)) == {1: Placement(("n1",), 1)}


@pytest.mark.parametrize(
    "mine",
    [
        {},  # of lower priority
        {"priority": 200, "held_by_user": True},
        {"priority": 200, "dependent": True},
        {"priority": 200, "begin_time": NOW + 60},
        {"priority": 200, "job_id": 2},  # the plan places it
        {"priority": 200, "demands": Demands(nodelist=frozenset({"n1"}))},
        {"priority": 200, "spec": JobSpec(min_gpus=17)},
    ],
)
def test_other_jobs_are_kept_back(mine: dict[str, object]) -> None:
    number = mine.pop("job_id", 1)
    assert chosen(replace(ours(**mine), job_id=number), plain()) == {}


def test_nothing_is_released_without_plain_jobs() -> None:
    assert chosen(ours(priority=200)) == {}
    assert chosen(ours(priority=200), plain(reason="Dependency")) == {}


def test_a_higher_tier_contends_with_jobs_that_run() -> None:
    runs = job(9, JobState.RUNNING, spec=None, gpus_per_node_held={"n1": 4}, priority=900)
    assert chosen(ours(partition="high"), runs) == {1: Placement(("n1",), 1)}
    assert chosen(ours(priority=2000), runs) == {}


def test_a_qos_that_preempts_contends_with_jobs_that_run() -> None:
    def by_qos(*jobs: SlurmJob, **preempts: set[str]) -> list[tuple[int, str]]:
        rules = replace(RULES, preempts={qos: frozenset(others) for qos, others in preempts.items()})
        state = ClusterState(NOW, NODES, jobs, rules=rules)
        return [(one.job.job_id, one.before) for one in contending(state, {1})]

    runs = job(9, JobState.RUNNING, spec=None, qos="scavenge", gpus_per_node_held={"n1": 4}, priority=900)
    mine = ours(priority=100, qos="normal")
    assert by_qos(mine, runs, normal={"scavenge", "spot"}) == [
        (1, "its QOS may preempt jobs of QOS scavenge")
    ]
    assert by_qos(mine, replace(runs, spec=JobSpec()), normal={"scavenge"})
    assert not by_qos(mine, runs)
    assert not by_qos(mine, runs, normal={"spot"})
    assert not by_qos(mine, runs, scavenge={"normal"})
    assert not by_qos(mine, replace(runs, state=JobState.COMPLETED), normal={"scavenge"})
    assert not by_qos(mine, replace(runs, gpus_per_node_held={"elsewhere": 4}), normal={"scavenge"})


def test_the_reason_says_what_slurm_may_do() -> None:
    waits = Allocation(1, NO_PLACEMENT, 0.0, 0.0, 32, False, "waits for GPUs")
    plan = Plan((waits, replace(waits, job_id=2)), 0.0, 0.0, "exact")
    told = with_contenders(plan, [Contender(ours(), Placement(("n1",), 4), "plain jobs come after it")])
    assert [one.reason for one in told.allocations] == [
        "waits for GPUs; Slurm may start it on 4 GPUs: plain jobs come after it",
        "waits for GPUs",
    ]
    assert with_contenders(plan, []) == plan


def test_the_least_size_is_on_the_fewest_nodes() -> None:
    capacity = {"n1": 2, "n2": 4, "n3": 4}
    names = sorted(capacity)
    assert least_size(4, names, capacity) == Placement(("n2",), 4)
    assert least_size(8, names, capacity) == Placement(("n2", "n3"), 4)
    assert least_size(6, names, capacity) == Placement(("n2", "n3"), 3)
    assert least_size(5, names, capacity) == Placement()


TWO_NODES = (Node("n1", 4, cpus=8), Node("n2", 4, cpus=8))


def waiting_jobs(slurm: FakeSlurm) -> WaitingJobs:
    return WaitingJobs(slurm, lease=300.0, authorize=lambda: 1, clock=slurm.clock, monotonic=slurm.clock)


def contended(slurm: FakeSlurm, candidates: set[int]) -> WaitingJobs:
    """Let the candidates contend with a plain job that waits behind them."""
    queue, state = waiting_jobs(slurm), slurm.observe()
    waits = plain(999, priority=-1, partition=state.jobs[0].partition, submit_time=state.taken_at)
    queue.contend(contending(replace(state, jobs=(*state.jobs, waits)), candidates), state.taken_at)
    return queue


def test_slurm_starts_a_released_job_anywhere_once_a_plain_job_ends() -> None:
    slurm = FakeSlurm(TWO_NODES)
    for _ in range(2):
        running = slurm.submit(None, gpus_per_node=4)
    slurm.advance(2)
    mine = slurm.submit(JobSpec(min_gpus=2), gpus_per_node=4, lease=600)
    queue = contended(slurm, {mine})
    assert queue.contending == {mine}
    slurm.finish(running)
    slurm.advance(3)
    started = slurm.jobs([mine])[mine]
    assert (started.state, started.gpus_per_node_held) == (JobState.RUNNING, {"n2": 2})


def test_a_job_whose_start_has_failed_is_bound_to_no_node() -> None:
    slurm = FakeSlurm(TWO_NODES)
    plain = [slurm.submit(None, gpus_per_node=4) for _ in range(2)]
    slurm.advance(2)
    mine = slurm.submit(JobSpec(min_gpus=2), gpus_per_node=2, lease=20)
    queue = waiting_jobs(slurm)

    def restore(*still: int) -> None:
        queue.restore_sizes({job.job_id: job for job in slurm.observe().jobs if job.spec is not None}, still)

    restore(mine)
    queue.resized(mine)
    slurm.configure(mine, Geometry(("n2",), 4, 1), start=False)
    restore()  # a look at Slurm while the move is under way
    restore(mine)  # and one after it has failed
    slurm.finish(plain[0])
    slurm.advance(30)  # polluxd is gone, and the lease has ended
    started = slurm.jobs([mine])[mine]
    assert (started.state, started.gpus_per_node_held) == (JobState.RUNNING, {"n1": 2})


def test_the_lease_of_a_released_job_is_not_renewed() -> None:
    mine = ours()
    assert kept_back({1: mine}, {}, []) == [mine]
    assert kept_back({1: mine}, {}, [], {1}) == []


WAITING = SnapshotJob(1, "train", "ann", "lab", "gpu", JobSpec(), 0.0, 60.0)


def left(job: SnapshotJob = WAITING, placed: Placement = NO_PLACEMENT, **settings: object) -> frozenset[int]:
    snapshot = Snapshot("lab", NOW, NODES, (job,), PolicySettings(**settings))
    return unplaced(snapshot, build.plan([job], {1: placed}))


def test_a_job_that_the_plan_has_no_gpus_for_may_contend() -> None:
    assert left() == {1}
    assert left(placed=Placement(("n1",), 1)) == frozenset()
    assert left(replace(WAITING, placement=Placement(("n1",), 1))) == frozenset()
    assert left(replace(WAITING, pinned=True)) == frozenset()


def test_a_job_under_a_rule_that_slurm_does_not_keep_may_not_contend() -> None:
    assert left(replace(WAITING, spec=JobSpec(gpu_counts="powers-of-two"))) == frozenset()
    assert left(gpu_counts="powers-of-two") == frozenset()
    assert left(account_ceilings={"lab": 4}) == left(user_ceilings={"ann": 4}) == frozenset()
    assert left(account_ceilings={"other": 4}, user_ceilings={"bob": 4}) == {1}


def test_a_job_that_waits_for_the_sake_of_money_may_not_contend() -> None:
    """Slurm would boot any rented node for it."""
    off = node("c1", power="off", gpu_type="big")
    waits = build_job(1, JobSpec(min_gpus=4))
    for prices in ({}, {"big": 9.0}):
        snap = snapshot([node("n1", 2), off], [waits], cloud_prices=prices)
        plan = decide(snap)
        if not prices:  # an own node that is off boots for a job that has no room elsewhere
            assert plan.of(1).placement
        else:
            assert not plan.of(1).placement
            assert unplaced(snap, plan) == frozenset()


def test_a_job_beyond_its_user_s_share_may_not_contend() -> None:
    """Half of the GPUs are ann's, who holds them, and half are bob's."""
    share = sum(node.capacity for node in NODES) // 2
    mine = replace(WAITING, job_id=2, placement=Placement(("n1",), share), started=True)
    more = replace(WAITING, job_id=3, user="bob", spec=JobSpec(min_gpus=share))
    last = replace(WAITING, job_id=4, user="bob", submitted_at=10.0)
    jobs = (WAITING, mine, more, last)
    for fairness_per, may in (("user", {3}), ("job", {1, 3, 4})):
        snapshot = Snapshot("lab", NOW, NODES, jobs, PolicySettings(fairness_per=fairness_per))
        assert unplaced(snapshot, build.plan(jobs, {2: mine.placement})) == may


def test_no_more_jobs_contend_than_gpus_may_come_free_and_50_at_a_step() -> None:
    slurm = FakeSlurm([Node("n1", gpus=100, cpus=200)])
    slurm.submit(None, gpus_per_node=100)
    slurm.advance(2)
    mine = [slurm.submit(JobSpec(min_gpus=1), gpus_per_node=1, lease=600) for _ in range(130)]
    queue = contended(slurm, set(mine))
    assert len(queue.contending) == 100
    slurm.advance(2)
    released = [
        job for job in slurm.observe().jobs if job.job_id in mine and job.eligible_time <= slurm.clock()
    ]
    assert len(released) == 50


def test_a_job_that_polluxd_could_never_place_is_left_to_slurm() -> None:
    unlike = (
        Node("n1", 2, "a100", cpus=8, partitions=frozenset({"main"})),
        Node("n2", 2, "t4", cpus=8, partitions=frozenset({"main"})),
    )
    one = build_job(1, JobSpec(min_gpus=4, max_gpus=4))
    fits = build_job(2, JobSpec(min_gpus=2, max_gpus=2))
    plan = decide(snapshot(unlike, [one, fits]))
    assert impossible(plan) == {1}, plan.of(1).reason
    waits = job(1, JobState.PENDING, spec=one.spec)
    state = ClusterState(NOW, unlike, (waits,), rules=RULES)
    (found,) = contending(replace(state, rules=Rules({})), {1}, {1})
    assert (found.size, found.before) == (Placement(("n1", "n2"), 2), "polluxd has no placement for it")
    assert contending(replace(state, rules=Rules({})), {1}) == []
