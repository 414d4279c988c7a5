"""What Slurm's limits leave to jobs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.apply.capacity import capacity
from polluxd.apply.headroom import Headroom, headroom
from polluxd.config.settings import PolicySettings
from polluxd.model import GpuLimit, JobSpec, JobState, Node, Placement, Snapshot, SnapshotJob
from polluxd.policy import decide
from polluxd.slurm.demands import Demands
from polluxd.slurm.limits import Association, GroupLimits, JobLimits, Limits, Qos
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Rules
from tests.unit.apply.four_nodes import ALL, HOUR, MAIN, NODES, NOW, job

ROOT = Association("root", None, "", "", GroupLimits(), JobLimits())


def account(name: str = "vision", **limits: object) -> Association:
    return Association(name, None, "", "root", GroupLimits(**limits), JobLimits())


def limits(*associations: Association, qos: tuple[Qos, ...] = ()) -> Limits:
    known = {(one.account, one.uid, one.partition): one for one in (ROOT, *associations)}
    return Limits(known, {one.name: one for one in qos})


def running(job_id: int, gpus: int, **other: object) -> SlurmJob:
    return job(job_id, gpus_per_node_held={f"n{job_id}": gpus}, tres={"gres/gpu": gpus}, **other)


def waiting(job_id: int, **other: object) -> SlurmJob:
    return job(job_id, JobState.PENDING, submit_time=NOW - HOUR + job_id, **other)


def allowed(found: Limits, *jobs: SlurmJob, rules: Rules | None = None) -> Headroom:
    return headroom(ClusterState(NOW, NODES, jobs, {}, rules or Rules(MAIN), found), ())


def test_without_limits_nothing_is_bounded() -> None:
    found = allowed(limits(), running(1, 4), waiting(2))
    assert (found.most, found.groups, found.eligibility) == ({}, (), {})


def test_what_others_hold_of_an_accounts_limit_is_not_left_to_ours() -> None:
    foreign = running(3, 3, spec=None)
    elsewhere = running(4, 4, spec=None, account="speech")
    found = allowed(limits(account(tres={"gres/gpu": 6})), running(1, 2), waiting(2), foreign, elsewhere)
    assert found.groups == (GpuLimit("gres/gpu=6 of account vision", (1, 2), 3),)
    assert not found.eligibility


def test_a_parent_account_limits_its_children_together() -> None:
    lab = account("lab", tres={"gres/gpu": 6})
    child = replace(account("vision", tres={"gres/gpu": 4}), parent="lab")
    other = replace(account("speech"), parent="lab")
    found = allowed(limits(lab, child, other), running(1, 2), waiting(2, account="speech"))
    assert found.groups == (
        GpuLimit("gres/gpu=6 of account lab", (1, 2), 6),
        GpuLimit("gres/gpu=4 of account vision", (1,), 4),
    )


def test_a_qos_replaces_the_accounts_limit_and_its_use_still_counts_there() -> None:
    high = Qos("high", GroupLimits({"gres/gpu": 12}), JobLimits())
    found = allowed(
        limits(account(tres={"gres/gpu": 6}), qos=(high,)), running(1, 4, qos="high"), running(2, 1)
    )
    assert found.groups == (
        GpuLimit("gres/gpu=12 of QOS high", (1,), 12),
        GpuLimit("gres/gpu=6 of account vision", (2,), 2),
    )


def test_jobs_above_a_lowered_limit_stay_and_no_other_starts() -> None:
    found = allowed(limits(account(tres={"gres/gpu": 3})), running(1, 4), waiting(2))
    assert found.groups == ()
    assert {i: s.nodes for i, s in found.eligibility.items()} == {1: frozenset(), 2: frozenset()}
    assert "gres/gpu=3 of account vision is exceeded" in found.eligibility[1].rule


def test_limits_per_job() -> None:
    qos = Qos("normal", GroupLimits(), JobLimits({"gres/gpu": 4}, 2 * HOUR))
    own = Association("vision", 1000, "", "", GroupLimits(), JobLimits({"gres/gpu": 1, "cpu": 6}))
    found = allowed(
        limits(own, qos=(qos,)), waiting(1, spec=JobSpec(cpus_per_gpu=2)), waiting(2, limit=3 * HOUR)
    )
    assert found.most[1] == (3, "MaxTRESPerJob=cpu=6 of account vision"), "the QOS's gres/gpu=4 replaces 1"
    assert "MaxWall=120 min of QOS normal" in found.eligibility[2].rule
    assert 1 not in found.eligibility


def test_a_limit_on_each_node_bounds_jobs_that_fit_on_a_part_of_a_node() -> None:
    found = allowed(
        limits(qos=(Qos("normal", GroupLimits(), JobLimits(per_node={"gres/gpu": 2})),)),
        waiting(1),
        waiting(2, spec=JobSpec(min_gpus=4)),
    )
    assert found.most[1] == (2, "MaxTRESPerNode=gres/gpu=2 of QOS normal")
    assert 2 not in found.most, "what its user asked for is Slurm's to answer"


def test_a_limit_of_one_gpu_leaves_one_and_a_limit_of_none_keeps_the_job_out() -> None:
    for most, kept_out in ((1, set()), (0, {1})):
        qos = Qos("normal", GroupLimits(), JobLimits({"gres/gpu": most}))
        found = allowed(limits(qos=(qos,)), waiting(1))
        assert found.most[1] == (most, f"MaxTRESPerJob=gres/gpu={most} of QOS normal")
        assert set(found.eligibility) == kept_out


def test_a_least_size_that_was_raised_keeps_a_smaller_training_where_it_is() -> None:
    found = limits(qos=(Qos("normal", GroupLimits(), JobLimits(least={"gres/gpu": 4})),))
    assert set(allowed(found, running(1, 2), running(2, 4), waiting(3)).eligibility) == {1}
    rules = Rules({"main": replace(MAIN["main"], min_nodes=2)})
    assert set(allowed(limits(), running(1, 4), rules=rules).eligibility) == {1}


def test_the_time_limit_of_the_partitions_qos_replaces_the_jobs() -> None:
    short = Qos("short", GroupLimits(), JobLimits({}, HOUR))
    rules = Rules({"main": Partition("main", "UP", ALL, qos="whole")})
    for wall, kept_out in ((None, {1, 2}), (4 * HOUR, set()), (2 * HOUR, {2})):
        whole = Qos("whole", GroupLimits(), JobLimits({}, wall))
        jobs = (waiting(1, qos="short", limit=2 * HOUR), waiting(2, qos="short", limit=3 * HOUR))
        found = allowed(limits(qos=(short, whole)), *jobs, rules=rules)
        assert set(found.eligibility) == kept_out, wall


def test_a_job_without_gpus_uses_none_of_a_limit_on_gpus() -> None:
    foreign = job(3, spec=None, gpus_per_node_held={}, tres={"cpu": 4})
    found = allowed(limits(account(tres={"gres/gpu": 6})), running(1, 2), foreign)
    assert found.groups == (GpuLimit("gres/gpu=6 of account vision", (1,), 6),)


def test_a_partitions_node_limit_bounds_the_gpus() -> None:
    rules = Rules({"main": Partition("main", "UP", ALL, max_nodes=2)})
    assert allowed(limits(), waiting(1), rules=rules).most == {1: (8, "MaxNodes=2 of partition main")}


def test_running_jobs_are_counted_and_the_oldest_waiting_come_first() -> None:
    own = Association("vision", 1000, "", "", GroupLimits(), JobLimits(), jobs=3)
    found = allowed(limits(own), running(1, 1), waiting(3), waiting(2), running(4, 1, spec=None))
    assert set(found.eligibility) == {3}
    assert (
        "the limit of 3 running jobs of user alice in account vision (MaxJobs) is reached"
        in found.eligibility[3].rule
    )


def test_used_up_time_starts_nothing() -> None:
    found = allowed(limits(account(used_up=("GrpTRESMins=gres/gpu=1000",))), running(1, 1), waiting(2))
    assert set(found.eligibility) == {1, 2}
    assert "GrpTRESMins=gres/gpu=1000 of account vision is used up" in found.eligibility[1].rule


def test_a_job_keeps_a_license_that_another_one_waits_for() -> None:
    rules, one = Rules(MAIN, licenses={"matlab": 0, "ansys": 1}), {"matlab": 1}
    plain = waiting(2, licenses=one, spec=None)
    found = allowed(limits(), running(1, 1, licenses=one), plain, rules=rules)
    assert found.eligibility[1].rule == "a waiting job wants license matlab, which it would lose"
    held = replace(plain, held_by_user=True)
    spare = {"licenses": {"ansys": 1}}
    assert not allowed(limits(), running(1, 1, licenses=one), held, rules=rules).eligibility
    assert not allowed(
        limits(), running(1, 1, **spare), waiting(2, spec=None, **spare), rules=rules
    ).eligibility


def test_limits_on_memory_and_billing_count_what_goes_with_each_gpu() -> None:
    known = {"gres/gpu": 2, "billing": 3, "mem": 1000}
    mine = replace(running(1, 2, mem_per_gpu_mb=500), tres=known)
    for name, most in (("mem", 1600), ("billing", 5)):
        of_job = limits(qos=(Qos("normal", GroupLimits(), JobLimits({name: most})),))
        assert allowed(of_job, mine).most[1] == (3, f"MaxTRESPerJob={name}={most} of QOS normal")
        together = limits(account(tres={name: most + 700}))
        foreign = replace(running(3, 3, spec=None), tres={"mem": 700, "billing": 700})
        (group,) = allowed(together, mine, foreign).groups
        assert group == GpuLimit(f"{name}={most + 700} of account vision", (1,), 3)
    assert not allowed(limits(account(tres={"fs/disk": 5})), mine).groups, "nobody knows what it uses of it"


def test_licenses_go_to_the_oldest_waiting_job() -> None:
    one = {"matlab": 1}
    rules = Rules(MAIN, (), {"matlab": 1})
    found = allowed(
        limits(), running(1, 1, licenses=one), waiting(3, licenses=one), waiting(2, licenses=one), rules=rules
    )
    assert {i: s.rule for i, s in found.eligibility.items()} == {
        1: "a waiting job wants license matlab, which it would lose",
        3: "license matlab is in use",
    }


def test_of_an_array_that_runs_one_task_at_a_time_the_one_that_runs_may_start_again() -> None:
    one = Demands(array_limit=1)
    runs, waits = running(1, 1, array=(1, 1), demands=one), waiting(2, array=(1, 2), demands=one)
    assert allowed(limits(), runs, waits).eligibility.keys() == {2}


def test_tasks_of_an_array_take_turns() -> None:
    four = Demands(array_limit=2)
    tasks = [waiting(2 + t, array=(2, t), demands=four) for t in range(3)]
    found = allowed(
        limits(), running(1, 1, array=(2, 9), demands=four), *tasks, waiting(9, array=(9, 0), demands=four)
    )
    assert set(found.eligibility) == {3, 4}
    assert found.eligibility[3].rule == "the limit of 2 running tasks of array 2 is reached"


@pytest.mark.parametrize(("gpus", "fits"), [(2, True), (3, False)])
def test_a_start_waits_until_the_limit_has_room(gpus: int, fits: bool) -> None:
    nodes = tuple(Node(f"n{i}", 4) for i in (1, 2))
    jobs = {1: running(1, 4), 2: waiting(2)}
    room = capacity(nodes, jobs, [], limits=(GpuLimit("six", (1, 2), 6),))
    target = Placement(("n2",), gpus)
    assert room.fits_now(target, 2) is fits
    assert room.fits_now(target, 9), "it is not in the group"
    room.take(Placement(("n2",), 1), 2)
    assert not room.fits_now(target, 2)
    assert room.fits_soon(Placement(("n1",), 4), Placement(("n1",), 4), 1)


def test_the_plan_keeps_to_a_limit_and_says_so() -> None:
    nodes = tuple(Node(f"n{i}", 4) for i in (1, 2))
    jobs = tuple(
        SnapshotJob(i, "", "alice", "vision", "main", JobSpec(min_gpus=4, max_gpus=4), NOW, 10.0)
        for i in (1, 2)
    )
    free = decide(Snapshot("c", NOW, nodes, jobs))
    assert [a.placement.gpus for a in free.allocations] == [4, 4]
    bound = decide(
        Snapshot("c", NOW, nodes, jobs, PolicySettings(), (GpuLimit("gres/gpu=6 of account lab", (1, 2), 6),))
    )
    assert sorted(a.placement.gpus for a in bound.allocations) == [0, 4]
    assert any("the ceiling of gres/gpu=6 of account lab is reached" in a.reason for a in bound.allocations)
    capped = decide(
        Snapshot("c", NOW, nodes, (replace(jobs[0], spec=JobSpec(max_gpus=1), max_gpus_rule="MaxNodes=1"),))
    )
    assert "MaxNodes=1 allows no more" in capped.allocations[0].reason


def test_gpu_minutes_of_a_job_are_gpus_within_its_time_limit() -> None:
    per_job = JobLimits(minutes={"gres/gpu": 240, "cpu": 2400})
    found = allowed(
        limits(qos=(Qos("normal", GroupLimits(), per_job),)),
        waiting(1, limit=HOUR),
        waiting(2, limit=8 * HOUR),
        waiting(3, limit=None),
        running(4, 4, start_time=NOW - HOUR / 2, limit=HOUR, spec=JobSpec(cpus_per_gpu=20)),
        waiting(5, limit=HOUR, qos="other"),
    )
    assert {number: most for number, (most, _) in found.most.items()} == {1: 4, 2: 0, 3: 0, 4: 4}
    assert "MaxTRESMinsPerJob=gres/gpu=240 of QOS normal" in found.most[1][1]
    assert set(found.eligibility) == {2, 3}


def test_minutes_of_running_jobs_leave_smaller_jobs_their_start() -> None:
    lab = account(running_minutes={"GrpTRESRunMins=gres/gpu": 600})
    found = allowed(
        limits(lab),
        running(4, 4, spec=None, start_time=NOW, limit=2 * HOUR),
        waiting(1, limit=HOUR),
        waiting(2, limit=8 * HOUR),
        waiting(3, limit=8 * HOUR, account="speech"),
    )
    assert {number: most for number, (most, _) in found.most.items()} == {1: 2}
    assert set(found.eligibility) == {2}
    assert "GrpTRESRunMins=gres/gpu=600 of account vision" in found.eligibility[2].rule


def test_what_slurm_counts_of_running_jobs_shows_the_factor_of_their_qos() -> None:
    rule = {"GrpTRESRunMins=gres/gpu": 300}
    mine = replace(running(1, 2, start_time=NOW, limit=HOUR), tres={"gres/gpu": 2})
    for counted, most in ((118, 5), (120, 5), (240, 2)):
        lab = account(running_minutes=rule, counted_minutes={"gres/gpu": counted})
        assert allowed(limits(lab), mine).most[1][0] == most
        assert allowed(limits(lab), waiting(2, limit=HOUR)).most[2][0] == 5, (
            "it does not go by what may be old"
        )


def lending(job_id: int, *companions: int, **other: object) -> SlurmJob:
    lent = tuple(running(number, 4) for number in companions)
    held = {f"n{job_id}": 4} | {f"n{number}": 4 for number in companions}
    return replace(running(job_id, 4, **other), companions=lent, gpus_per_node_held=held)


@pytest.mark.parametrize(("most", "none_left", "kept"), [(5, set(), None), (4, {1, 2}, None), (3, {1, 2}, 4)])
def test_a_companion_never_takes_the_last_job_that_a_user_may_submit(
    most: int, none_left: set[int], kept: int | None
) -> None:
    own = Association("vision", 1000, "", "", GroupLimits(), JobLimits(), submitted=most)
    found = allowed(limits(own), lending(1, 3), waiting(2))
    assert set(found.no_companion) == none_left
    assert found.most.get(1, (None,))[0] == kept


def test_a_companion_goes_where_it_keeps_another_job_from_running() -> None:
    own = Association("vision", 1000, "", "", GroupLimits(), JobLimits(), jobs=2)
    assert not allowed(limits(own), lending(1, 3)).most
    found = allowed(limits(own), lending(1, 3), waiting(2, spec=None, reason="AssocMaxJobsLimit"))
    assert found.most[1] == (
        4,
        "the limit of 2 running jobs of user alice in account vision (MaxJobs), whose last one a companion took,",
    )


def kept_out(job_id: int, gpus: int, reason: str = "AssocGrpGRES", **other: object) -> SlurmJob:
    return waiting(job_id, spec=None, reason=reason, tres={"gres/gpu": gpus, "node": 1}, **other)


@pytest.mark.parametrize("reason", ["AssocGrpGRES", "QOSGrpGRES", "Resources"])
def test_what_jobs_hold_above_their_request_gives_way_within_a_limit(reason: str) -> None:
    lab = account(tres={"gres/gpu": 6})
    found = allowed(limits(lab), running(1, 4), running(2, 2), kept_out(3, 4, reason))
    assert found.groups == (GpuLimit("gres/gpu=6 of account vision", (1, 2), 2),)
    assert set(found.admitted) == {3}


@pytest.mark.parametrize(
    ("plain", "ours"),
    [
        (kept_out(3, 5), JobSpec()),
        (kept_out(3, 4), JobSpec(min_gpus=2)),
        (kept_out(3, 4), JobSpec(gpu_counts="powers-of-two")),
        (kept_out(3, 4, "BeginTime"), JobSpec()),
        (kept_out(3, 4, held_by_user=True), JobSpec()),
        (kept_out(3, 4, account="speech"), JobSpec()),
    ],
)
def test_what_could_not_start_all_the_same_gets_nothing(plain: SlurmJob, ours: JobSpec) -> None:
    found = allowed(
        limits(account(tres={"gres/gpu": 6})), running(1, 4, spec=ours), running(2, 2, spec=ours), plain
    )
    assert found.groups == (GpuLimit("gres/gpu=6 of account vision", (1, 2), 6),)
    assert not found.admitted


def test_the_user_s_own_plain_job_gets_way_within_the_limit_of_a_user() -> None:
    qos = Qos("normal", GroupLimits(), JobLimits(), GroupLimits({"gres/gpu": 4}))
    found = allowed(
        limits(account(), qos=(qos,)),
        running(1, 4),
        kept_out(3, 2, "QOSMaxGRESPerUser"),
        waiting(4, user="bea"),
    )
    assert [(group.jobs, group.gpus) for group in found.groups] == [((1,), 2), ((4,), 4)]


def test_the_plan_gives_what_a_limit_needs() -> None:
    found = allowed(limits(account(tres={"gres/gpu": 4})), running(1, 4), kept_out(3, 2))
    snapshot = Snapshot(
        "dev",
        NOW,
        NODES,
        (
            SnapshotJob(
                1, "", "alice", "vision", "main", JobSpec(), NOW, HOUR, Placement(("n1",), 4), started=True
            ),
        ),
        PolicySettings(),
        found.groups,
    )
    assert decide(snapshot).allocations[0].placement.gpus <= 2
