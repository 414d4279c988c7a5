"""The snapshot that the policy gets.

The tests check which jobs are in the snapshot, which are pinned, and that the snapshot survives being stored.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from typing import Any

import pytest

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.apply.companions import ClusterView
from polluxd.apply.paths import MoveRules
from polluxd.apply.startable import Eligibility
from polluxd.config.settings import PolicySettings
from polluxd.cycle.snapshot import ClusterFacts, WaitingTimes, build_snapshot
from polluxd.cycle.trusted_reports import Judged
from polluxd.model import NO_PLACEMENT, JobSpec, JobState, Node, Placement, Report, Snapshot, Step
from polluxd.model.snapshot_json import decode_snapshot, encode, to_json
from polluxd.policy import decide
from polluxd.policy.domains import eligible, partitions_of
from polluxd.policy.owners import weights
from polluxd.slurm.priority import priority_weights
from polluxd.slurm.protocol import ClusterState, Companion, SlurmJob
from polluxd.store import CycleRecords, JobTimes, MoveTotals
from tests import build

NODES = (Node("n1", 4, partitions=frozenset({"main"})), Node("n2", 4, foreign_gpus=1))
REPORT = Report(
    attempt=0,
    at=90.0,
    limits=BatchLimits(32, 1024, 8, 128),
    params=ThroughputParams(0.1, 0.001, 0.01, 0.002, 0.1 + 0.2, 0.005, 1.5),
    noise=NoiseScale(0.25, 1 / 3),
    explored_gpus=2,
    first_step_at=50.0,
)


def slurm_job(job_id: int, state: JobState = JobState.RUNNING, **more: object) -> SlurmJob:
    return build.slurm_job(job_id, state, **{"submit_time": 10.0, **more})


def test_a_job_that_cannot_move_is_no_taker_and_no_giver() -> None:
    here = {"gpus_per_node_held": {"n1": 2}}
    full = replace(REPORT, immovable="no checkpoint can be written: the disk is full")
    (job,) = snapshot(slurm_job(1, **here), reports={1: full}).jobs
    assert (job.pinned, "disk is full" in job.pin_reason) == (True, True)
    (job,) = snapshot(slurm_job(1, **here), reports={1: REPORT}, undrained=lambda _job_id: 1).jobs
    assert (job.pinned, "left an order to drain undone" in job.pin_reason) == (True, True)
    saved = replace(REPORT, checkpointed=True)
    (job,) = snapshot(slurm_job(1, **here), reports={1: saved}, undrained=lambda _job_id: 1).jobs
    assert not job.pinned, "it has shown that it can save"


def test_a_job_whose_place_a_plain_job_could_take_stays_within_it_unless_it_is_resized_in_place() -> None:
    here, risk = {"gpus_per_node_held": {"n1": 4}}, {1: "job 9 (Resources), which Slurm may start before it,"}
    (job,) = snapshot(slurm_job(1, **here), reports={1: REPORT}, at_risk=risk).jobs
    assert (job.spec.max_gpus, job.max_gpus_rule) == (4, risk[1])
    assert job.partition != "main", "its own nodes alone"
    able = replace(REPORT, resize="in-place")
    words = {"reports": {1: able}, "paths": frozenset({"resize", "requeue"}), "can_shrink": True}
    (job,) = snapshot(slurm_job(1, **here), at_risk=risk, **words).jobs
    assert (job.spec.max_gpus, job.partition) == (None, "main")


@pytest.mark.parametrize(("done", "most"), [(9_990.0, 2), (100.0, None)])
def test_a_training_about_to_end_grows_no_more(done: float, most: int | None) -> None:
    here = {"gpus_per_node_held": {"n1": 2}}
    report = replace(REPORT, progress=done, target=10_000.0, goodput=64.0)
    (job,) = snapshot(slurm_job(1, **here), reports={1: report}).jobs
    assert job.spec.max_gpus == most
    assert ("its end in about 5 s" in job.max_gpus_rule) is (most == 2)


def test_features_stay_where_a_node_has_or_may_get_a_price() -> None:
    kinds = {"off": "off", "on": "on", "priced": "on"}
    found = tuple(Node(n, 4, features=frozenset({n}), power=p) for n, p in kinds.items())
    snap = built(ClusterState(100.0, found, ()), settings=PolicySettings(cloud_prices={"priced": 1.0}))
    assert [n.features for n in snap.nodes] == [{"off"}, frozenset(), {"priced"}]


def snapshot(*jobs: SlurmJob, **more: object) -> Snapshot:
    return built(ClusterState(100.0, NODES, jobs), **more)


def built(state: ClusterState, **more: Any) -> Snapshot:
    """The snapshot of a cluster; `more` has fields of its site, its records and its rules, doubts and orphans."""

    def part(kind: Any, **fixed: str) -> Any:
        return kind(**fixed, **{f.name: more.pop(f.name) for f in fields(kind) if f.name in more})

    seen = ClusterView(state, {}, more.pop("orphans", ()), {})
    facts, records, rules = part(ClusterFacts, cluster="dev"), part(CycleRecords), part(MoveRules)
    judged = Judged({}, more.pop("doubts", {}), {})
    assert not more
    return build_snapshot(facts, seen, records, rules, judged)


def test_only_jobs_that_can_be_given_gpus_are_decided_on() -> None:
    pending = JobState.PENDING
    seen = snapshot(
        slurm_job(1, pending),
        slurm_job(2, pending, held_by_user=True),
        slurm_job(3, pending, dependent=True),
        slurm_job(4, pending, begin_time=200.0),
        slurm_job(5, pending, begin_time=50.0),
        slurm_job(6, JobState.COMPLETED),
        slurm_job(7, spec=None, gpus_per_node_held={"n1": 1}),
        slurm_job(8, JobState.COMPLETING, gpus_per_node_held={"n1": 2}),
    )
    assert [job.job_id for job in seen.jobs] == [1, 5]
    # The job that opted out is counted by the Slurm client already; ours that is ending is counted here.
    assert {n.name: n.foreign_gpus for n in seen.nodes} == {"n1": 2, "n2": 1}


def test_uneven_gpus_count_as_used_and_are_left_alone() -> None:
    seen = snapshot(slurm_job(1, gpus_per_node_held={"n1": 3, "n2": 1}))
    assert seen.jobs == ()
    assert [n.foreign_gpus for n in seen.nodes] == [3, 2]


def test_a_running_job_is_pinned_until_it_reports_a_step_of_this_attempt() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 2})
    assert snapshot(running).jobs[0].pinned
    for unusable in (replace(REPORT, attempt=7), replace(REPORT, first_step_at=None)):
        assert snapshot(running, reports={1: unusable}).jobs[0].pinned
    assert not snapshot(running, reports={1: REPORT}).jobs[0].pinned
    assert snapshot(replace(running, spec=JobSpec(preemptible=False)), reports={1: REPORT}).jobs[0].pinned
    assert snapshot(running, reports={1: REPORT}, resting=lambda _: 5.0).jobs[0].pinned


def test_a_running_job_with_a_deadline_or_on_hold_is_pinned() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 2})
    for left_alone, why in (
        (replace(running, deadline=900.0), "has a deadline (--deadline)"),
        (replace(running, held_by_user=True), "on hold (scontrol hold)"),
    ):
        (seen,) = snapshot(left_alone, reports={1: REPORT}).jobs
        assert seen.pinned
        assert seen.pin_reason.startswith(why)


def test_a_job_on_hold_beyond_the_equal_share_is_offered_the_share_on_its_own_nodes() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 4}, held_by_user=True)
    (seen,) = snapshot(running, reports={1: REPORT}, beyond_share={1: 2}).jobs
    assert (seen.pinned, seen.spec.max_gpus) == (False, 2)
    assert "on hold (scontrol hold)" in seen.max_gpus_rule
    whole = snapshot(running, reports={1: REPORT}, beyond_share={1: 2})
    assert [node.name for node in whole.nodes if seen.partition in node.partitions] == ["n1"]
    (moved,) = decide(whole).allocations
    assert moved.placement == Placement(("n1",), 2), moved.reason
    assert "equal share" in moved.reason


def test_a_job_in_the_last_minutes_of_its_time_limit_is_not_moved() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 2}, start_time=10.0)
    late, early, over = (
        snapshot(replace(running, time_limit_s=90.0 + left), reports={1: REPORT})
        for left in (119.0, 121.0, -121.0)
    )
    assert not over.jobs[0].pinned, (
        "OverTimeLimit of slurm.conf lets it run on: its user may have asked for a minute"
    )
    assert late.jobs[0].pin_reason == "its time limit ends in 119 s: no move would pay"
    assert not early.jobs[0].pinned


def test_a_job_under_way_counts_where_it_is_going() -> None:
    target = Placement(("n1", "n2"), 2)
    move = build.move("requeue", Placement(("n1",), 1), target, Step.DRAINING, {}, job_id=1)
    seen = snapshot(slurm_job(1, gpus_per_node_held={"n1": 1}), reports={1: REPORT}, moves=(move,))
    assert seen.jobs[0].placement == target
    assert seen.jobs[0].pinned


def test_age_and_cost_come_from_the_database() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 2}, submit_time=95.0)
    job = snapshot(
        running,
        times={1: JobTimes(40.0, 50.0, 90.0)},
        reports={1: REPORT},
        totals={1: MoveTotals(2, 14.0, {"requeue": 7.0})},
    ).jobs[0]
    assert job.waiting == 10.0
    assert (job.age, job.lost_seconds, job.move_cost) == (60.0, 14.0, 7.0)
    assert snapshot(running).jobs[0].move_cost == 30.0


def test_a_job_that_may_not_grow_in_place_moves_through_the_queue() -> None:
    able = replace(REPORT, resize="in-place")
    part = slurm_job(1, gpus_per_node_held={"n1": 1}, batch_host="n1")
    for paths, resize in (({"resize", "requeue"}, "in-place"), ({"requeue"}, "requeue")):
        seen = snapshot(part, reports={1: able}, paths=frozenset(paths)).jobs[0].report
        assert seen.resize == resize


def test_a_move_costs_what_its_path_does() -> None:
    able = replace(REPORT, resize="in-place")
    whole = slurm_job(1, gpus_per_node_held={"n1": 4}, batch_host="n1")
    able_to = {"paths": frozenset({"resize", "requeue"}), "can_shrink": True}

    def costs(job: SlurmJob, **more: object) -> tuple[float, float | None]:
        given = {"reports": {1: able}, **able_to, **more}
        found = snapshot(job, **given).jobs[0]
        return found.move_cost, found.resize_cost

    assert costs(whole) == (30.0, 2.0)
    assert costs(whole, totals={1: MoveTotals(2, 14.0, {"requeue": 7.0})}) == (7.0, 2.0)
    assert costs(whole, totals={1: MoveTotals(3, 15.0, {"requeue": 7.0, "resize": 1.0})}) == (7.0, 1.0)
    assert costs(whole, reports={1: REPORT}) == (30.0, None)
    assert costs(slurm_job(1, gpus_per_node_held={"n1": 2}, batch_host="n1")) == (30.0, None)
    assert costs(whole, reports={1: REPORT}, start_s={1: 70.0}) == (70.0, None)
    spent = "the cluster's 2 moves an hour are used up"
    stay = {whole.user: spent}.get
    assert not snapshot(whole, reports={1: able}, **able_to, spent=stay).jobs[0].pinned, "it need not restart"
    assert snapshot(whole, reports={1: REPORT}, **able_to, spent=stay).jobs[0].pin_reason == spent
    other = replace(whole, user="another")
    assert not snapshot(other, reports={1: REPORT}, **able_to, spent=stay).jobs[0].pinned


def test_companions_of_nobody_hold_what_nobody_else_can_have() -> None:
    stray = slurm_job(9, gpus_per_node_held={"n1": 4}, companion=Companion(1, 0, 12))
    seen = snapshot(slurm_job(1, gpus_per_node_held={"n2": 2}), orphans=(stray,))
    assert [job.job_id for job in seen.jobs] == [1]
    assert [n.foreign_gpus for n in seen.nodes] == [4, 1]


def test_weights_count_once() -> None:
    """The weights of accounts and users count only once.

    The policy takes these weights from the settings. If the job's own weight contained them too, they would count
    squared.
    """
    settings = PolicySettings(account_weights={"lab": 2.0}, user_weights={"ann": 3.0})
    made = snapshot(slurm_job(1, JobState.PENDING), settings=settings)
    assert weights(made.jobs, made.settings)[0] == 6.0


def test_a_stored_snapshot_comes_back_bit_for_bit() -> None:
    original = snapshot(
        slurm_job(1, gpus_per_node_held={"n1": 2}),
        slurm_job(2, JobState.PENDING),
        reports={1: REPORT},
        settings=PolicySettings(power=-math.inf, account_weights={"lab": 0.1}),
    )
    assert decode_snapshot(json.loads(json.dumps(encode(original), allow_nan=False))) == original
    assert original.jobs[1].placement == NO_PLACEMENT


def test_nodes_that_slurms_topology_does_not_place_have_the_configured_rack() -> None:
    state = ClusterState(100.0, (replace(NODES[0], rack="s1"), *NODES[1:]), ())
    racks = {NODES[0].name: "r1", NODES[1].name: "r2"}
    seen = built(state, racks=racks)
    assert [n.rack for n in seen.nodes[:2]] == ["s1", "r2"]
    assert all(not n.rack for n in built(state).nodes[1:])


def test_a_job_that_could_not_start_where_it_is_stays_and_others_are_offered_what_is_allowed() -> None:
    running = slurm_job(1, gpus_per_node_held={"n1": 2})
    waiting = slurm_job(2, JobState.PENDING)
    free = slurm_job(3, JobState.PENDING)
    only_n2 = Eligibility(frozenset({"n2"}), "reservation maint begins soon")
    seen = snapshot(running, waiting, free, reports={1: REPORT}, eligibility={1: only_n2, 2: only_n2})
    jobs = {job.job_id: job for job in seen.jobs}
    assert jobs[1].pin_reason.startswith("reservation maint begins soon; it could not start again")
    assert not jobs[2].pinned
    offered = {j: {n.name for n in seen.nodes if eligible(partitions_of(jobs[j]), n)} for j in jobs}
    assert offered == {1: {"n1", "n2"}, 2: {"n2"}, 3: {"n1", "n2"}}
    nowhere = Eligibility(frozenset(), "partition main is DOWN")
    closed = snapshot(running, waiting, reports={1: REPORT}, eligibility={1: nowhere, 2: nowhere})
    assert [job.pinned for job in closed.jobs] == [True, True]
    assert [job.partition for job in closed.jobs] == ["main", "main"]


def weights_by_priority(power: float, **priorities: int) -> dict[int, float]:
    jobs = [
        slurm_job(n, JobState.PENDING, priority=p, uid=1000 + n) for n, p in enumerate(priorities.values(), 1)
    ]
    seen = snapshot(*jobs, settings=PolicySettings(slurm_priority=power))
    return {job.job_id: pytest.approx(job.weight) for job in seen.jobs}


def test_slurms_priority_weighs_jobs_against_the_median() -> None:
    assert weights_by_priority(1.0, a=50, b=100, c=400) == {1: 0.5, 2: 1.0, 3: 4.0}
    assert weights_by_priority(0.5, a=25, b=100, c=400) == {1: 0.5, 2: 1.0, 3: 2.0}
    assert weights_by_priority(0.0, a=25, b=100, c=400) == {1: 1.0, 2: 1.0, 3: 1.0}


def test_a_user_s_jobs_of_low_priority_shift_no_other_weight() -> None:
    jobs = [slurm_job(n, priority=p, uid=u) for n, p, u in ((1, 9000, 1), (2, 1000, 2), (3, 1, 2), (4, 1, 2))]
    assert priority_weights(jobs, 1.0) == {1: 1.8, 2: 0.2, 3: 0.1, 4: 0.1}


def test_no_priority_starves_the_others() -> None:
    assert weights_by_priority(1.0, a=1, b=1000, c=4_294_967_295) == {1: 0.1, 2: 1.0, 3: 10.0}
    assert weights_by_priority(1.0, a=0, b=100, c=100) == {1: 1.0, 2: 1.0, 3: 1.0}


def test_plain_jobs_and_ended_ones_count_for_no_median() -> None:
    others = (slurm_job(7, spec=None, priority=9), slurm_job(8, JobState.FAILED, priority=9))
    mine = (slurm_job(1, JobState.PENDING, priority=100), slurm_job(2, JobState.PENDING, priority=300, uid=9))
    seen = snapshot(*mine, *others, settings=PolicySettings(slurm_priority=1.0))
    assert [job.weight for job in seen.jobs] == [0.5, 1.5]


@pytest.mark.parametrize(("node_mb", "asked"), [(16000, 2000), (0, None)])
def test_memory_counts_where_slurm_shares_it_out(node_mb: int, asked: int | None) -> None:
    nodes = tuple(replace(node, memory_mb=node_mb) for node in NODES)
    job = slurm_job(1, JobState.PENDING, mem_per_gpu_mb=2000, spec=JobSpec(mem_per_gpu_mb=1999))
    seen = built(ClusterState(100.0, nodes, (job,)))
    assert seen.jobs[0].spec.mem_per_gpu_mb == asked


WAITS = slurm_job(7, JobState.PENDING)


@pytest.mark.parametrize("how", [{"held_by_user": True}, {"dependent": True}, {"begin_time": 501.0}])
def test_waiting_begins_when_the_user_lets_a_job_start(how: dict[str, object]) -> None:
    waiting, times = WaitingTimes(), {7: JobTimes(10.0)}
    kept_back = replace(WAITS, **how)
    assert waiting.corrected([kept_back], times, 400.0)[7].held_at == 400.0
    assert waiting.corrected([kept_back], times, 500.0)[7].held_at == 500.0
    for now in (600.0, 9000.0):
        assert waiting.corrected([WAITS], times, now)[7] == JobTimes(10.0, held_at=500.0)
    # It has run since, and its last GPUs count.
    assert waiting.corrected([WAITS], {7: JobTimes(10.0, held_at=800.0)}, 9000.0)[7].held_at == 800.0


def test_other_jobs_wait_from_their_submission_on() -> None:
    waiting = WaitingTimes()
    assert waiting.corrected([WAITS], {}, 400.0) == {}
    assert waiting.corrected([replace(WAITS, spec=None, held_by_user=True)], {}, 400.0) == {}


def test_a_job_that_is_gone_is_forgotten() -> None:
    waiting = WaitingTimes()
    waiting.corrected([replace(WAITS, held_by_user=True)], {}, 400.0)
    waiting.corrected([], {}, 500.0)
    assert waiting.corrected([WAITS], {7: JobTimes(10.0)}, 600.0)[7].held_at is None


def test_a_snapshot_keeps_of_a_report_what_decisions_use() -> None:
    claims = {f"type{n}" + "x" * 50: n + 1 for n in range(8)}
    fat = replace(
        REPORT,
        **{"goodput": 3.0, "throughput": 4.0, "refused": 4, "refused_why": "y" * 300, "data_wait": 0.5},
        **{"local_max_by_type": {"a100": 16, "": 32} | claims, "gpu_type": "a100"},
        params_by_type=dict.fromkeys(claims, REPORT.params),
    )
    nodes = (Node("n1", 4, "a100"), Node("n2", 4, "v100"))
    jobs = tuple(slurm_job(n, gpus_per_node_held={f"n{n}": 2}) for n in (1, 2))
    snap = built(ClusterState(100.0, nodes, jobs), reports=dict.fromkeys((1, 2), fat))
    for job in snap.jobs:
        assert set(job.report.params_by_type) == {"a100", "v100"}
        assert job.report.local_max_by_type == {"a100": 16, "": 32}
        assert job.report == job.report.for_decision({"a100", "v100"})
        assert len(to_json(replace(snap, jobs=(job,), nodes=()))) < 3600
    whole = replace(
        snap, jobs=tuple(replace(job, report=replace(job.report, goodput=9.0, at=5.0)) for job in snap.jobs)
    )
    assert decide(whole) == decide(snap)
