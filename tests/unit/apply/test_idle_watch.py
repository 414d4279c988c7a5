"""GPUs that stay idle beside a job that may use them."""

from __future__ import annotations

import pytest

from polluxd.apply.idle_watch import PREFIX, IdleWatch, free_gpus, note, remarked, startable_gpus
from polluxd.cli.status import health
from polluxd.config.settings import CycleSettings, MoveSettings
from polluxd.model import (
    KEPT_BACK,
    NO_PLACEMENT,
    Allocation,
    Explanation,
    JobSpec,
    JobState,
    Node,
    Placement,
    Plan,
)
from polluxd.slurm.demands import Demands
from polluxd.slurm.protocol import ClusterState, SlurmJob
from polluxd.slurm.rules import Partition, Rules
from tests import build

NOW = 1_800_000_000.0
PATIENCE = 60.0


def node(name: str, **other: object) -> Node:
    return build.node(name, **{"cpus": 16, "memory_mb": 8000, **other})


def job(job_id: int = 1, state: JobState = JobState.PENDING, **other: object) -> SlurmJob:
    return build.slurm_job(job_id, state, **{"submit_time": NOW, **other})


def cluster(
    nodes: tuple[Node, ...], *jobs: SlurmJob, at: float = NOW, rules: Rules | None = None
) -> ClusterState:
    return ClusterState(at, nodes, jobs, rules=rules or Rules())


def startable(
    nodes: tuple[Node, ...], waiting: SlurmJob, *others: SlurmJob, rules: Rules | None = None
) -> int:
    state = cluster(nodes, waiting, *others, rules=rules)
    return startable_gpus(waiting, state, free_gpus(state))


def plan(reason: str, limit: str = "fragmentation", placement: Placement = NO_PLACEMENT) -> Plan:
    explanation = Explanation(1, 1, 1.0, limit)
    return Plan((Allocation(1, placement, 0.0, 0.0, 0, False, reason, explanation),), 0.0, 0.0, "none")


def holds(gpus: int, name: str = "n1", job_id: int = 2, **other: object) -> SlurmJob:
    return job(
        job_id, JobState.RUNNING, gpus_per_node_held={name: gpus}, cpus_per_node_held={name: gpus}, **other
    )


@pytest.mark.parametrize(
    ("nodes", "waiting", "others", "gpus"),
    [
        ((node("n1"),), job(), (), 4),
        ((node("n1"),), job(), (holds(3),), 1),
        ((node("n1"),), job(), (holds(4),), 0),
        ((node("n1", foreign_gpus=4),), job(), (), 0),
        ((node("n1", schedulable=False),), job(), (), 0),
        ((node("n1", partitions=frozenset({"other"})),), job(), (), 0),
        ((node("n1", foreign_cpus=16),), job(), (), 0),
        ((node("n1", foreign_cpus=14),), job(spec=JobSpec(cpus_per_gpu=2)), (), 1),
        # Without a memory option a job asks for its GPUs' share of the memory at most, whatever Slurm's record shows.
        ((node("n1"),), job(mem_per_gpu_mb=8000), (), 4),
        ((node("n1", foreign_memory_mb=7000),), job(mem_per_gpu_mb=8000), (), 0),
        ((node("n1"),), job(spec=JobSpec(mem_per_gpu_mb=8000)), (), 1),
        ((node("n1"),), job(spec=JobSpec(min_gpus=4)), (holds(1),), 0),
        ((node("n1"), node("n2")), job(spec=JobSpec(min_gpus=8)), (), 8),
        ((node("n1"), node("n2")), job(spec=JobSpec(min_gpus=8)), (holds(1),), 0),
        ((node("n1"), node("n2")), job(spec=JobSpec(min_gpus=6)), (), 0),
        ((node("n1"),), job(spec=JobSpec(min_gpus=3, gpu_counts="powers-of-two")), (), 4),
        ((node("n1"),), job(spec=JobSpec(min_gpus=3, gpu_counts="powers-of-two")), (holds(1),), 0),
        ((node("n1"),), job(spec=JobSpec(gpu_counts="whole-nodes")), (holds(1),), 0),
        ((node("n1"),), job(spec=JobSpec(gpu_counts="2,4")), (holds(3),), 0),
        ((node("n1"), node("n2")), job(demands=Demands(exclude=frozenset({"n1"}))), (), 4),
        # Slurm is about to start a plain job there.
        ((node("n1"),), job(), (job(2, spec=None, planned_nodes=("n1",)),), 0),
    ],
)
def test_gpus_that_a_job_could_start_on(
    nodes: tuple[Node, ...], waiting: SlurmJob, others: tuple[SlurmJob, ...], gpus: int
) -> None:
    assert startable(nodes, waiting, *others) == gpus


def test_a_partition_that_starts_nothing_offers_nothing() -> None:
    down = Rules({"main": Partition("main", "DOWN", frozenset({"n1"}))})
    assert startable((node("n1"),), job(), rules=down) == 0


def idle_after(waiting: SlurmJob, seconds: float, found: Plan) -> list[object]:
    watch = IdleWatch(PATIENCE)
    for at in (0.0, seconds):
        watch.observe(cluster((node("n1"),), waiting, at=NOW + at))
    return list(watch.overdue(found, NOW + seconds))


def test_the_watch_speaks_after_its_patience_and_names_the_reason() -> None:
    found = plan("waits for GPUs; the 4 GPUs that are free do not form such a placement")
    assert idle_after(job(), PATIENCE - 1, found) == []
    (idle,) = idle_after(job(), PATIENCE + 1, found)
    text = note([idle])
    assert text.startswith(PREFIX)
    assert "4 GPUs that job 1 may use" in text
    assert "; " not in text, "a semicolon would end this part of the note"
    assert "tell an administrator" in remarked(found, [idle], NOW).allocations[0].reason


def test_tasks_that_share_a_record_are_watched() -> None:
    assert len(idle_after(job(tasks=(1, 2)), PATIENCE + 1, plan(""))) == 1


def test_time_under_a_stated_cause_does_not_count_once_it_has_gone() -> None:
    watch = IdleWatch(PATIENCE)
    limited, unexplained = plan("", "limit"), plan("")
    for seconds, found in ((0, limited), (PATIENCE + 5, limited), (PATIENCE + 10, unexplained)):
        watch.observe(cluster((node("n1"),), job(), at=NOW + seconds))
        overdue = watch.overdue(found, NOW + seconds)
        assert [one.stated for one in overdue] == ([True] if found is limited and seconds else [])
    watch.observe(cluster((node("n1"),), job(), at=NOW + 2 * PATIENCE + 20))
    (idle,) = watch.overdue(unexplained, NOW + 2 * PATIENCE + 20)
    assert (idle.stated, idle.since) == (False, NOW + PATIENCE + 5)


@pytest.mark.parametrize("start", [plan("", "contention", Placement(("n1",), 1)), plan("", "stays")])
def test_time_of_starts_that_fail_counts(start: Plan) -> None:
    watch = IdleWatch(PATIENCE)
    for seconds, found in ((0.0, start), (PATIENCE - 5, start), (PATIENCE + 5, plan(""))):
        watch.observe(cluster((node("n1"),), job(), at=NOW + seconds))
        overdue = watch.overdue(found, NOW + seconds)
    assert [(one.stated, one.since) for one in overdue] == [(False, NOW)]


@pytest.mark.parametrize(
    "waiting",
    [
        job(held_by_user=True),
        job(dependent=True),
        job(begin_time=NOW + 1e6),
        job(spec=None),
        job(tasks=(1, 2), demands=Demands(array_limit=1)),
        job(state=JobState.RUNNING),
    ],
)
def test_jobs_that_wait_for_their_user_or_do_not_wait_are_left_out(waiting: SlurmJob) -> None:
    assert idle_after(waiting, PATIENCE + 1, plan("")) == []


@pytest.mark.parametrize(
    ("found", "stated"),
    [
        (plan("", "contention"), False),
        (plan("", "nodes"), False),
        (plan("", "stays"), True),
        (plan(f"waits for GPUs{KEPT_BACK}any further one is not worth the price now"), True),
        (plan("", "ceiling"), True),
        (plan("", "contention", Placement(("n1",), 1)), True),
        (Plan((), 0.0, 0.0, "none"), False),
        (Plan((Allocation(1, NO_PLACEMENT, 0, 0, 0, False, "infeasible: too large"),), 0, 0, "none"), True),
        (Plan((Allocation(1, NO_PLACEMENT, 0, 0, 0, False, "waits: too few nodes"),), 0, 0, "none"), False),
    ],
)
def test_only_rules_limits_and_moves_explain_a_wait(found: Plan, stated: bool) -> None:
    (idle,) = idle_after(job(), PATIENCE + 1, found)
    assert idle.stated is stated
    assert bool(note([idle])) is not stated


def test_a_pause_in_which_the_job_could_not_start_begins_the_time_anew() -> None:
    watch = IdleWatch(PATIENCE)
    for at, others in ((0.0, ()), (40.0, (holds(4),)), (50.0, ()), (100.0, ())):
        watch.observe(cluster((node("n1"),), job(), *others, at=NOW + at))
    assert watch.overdue(plan(""), NOW + 100.0) == []
    watch.observe(cluster((node("n1"),), job(), at=NOW + 111.0))
    assert [one.since for one in watch.overdue(plan(""), NOW + 111.0)] == [NOW + 50.0]


STATUS = {
    "leader": "a",
    "leading": True,
    "decided_at": NOW,
    "paused": False,
    "note": "marks missing; idle since 2027-01-15 08:00:00 UTC: 4 GPUs that job 1 may use",
    "durations": {"decide_s": 1.0},
}


def test_status_reports_idle_gpus_and_slow_decisions() -> None:
    def verdict(**other: object) -> tuple[int, str]:
        found = health({**STATUS, **other}, [], CycleSettings(interval_s=60.0), MoveSettings(), NOW)
        return found.exit_status, found.message

    assert verdict() == (2, "idle since 2027-01-15 08:00:00 UTC: 4 GPUs that job 1 may use")
    assert verdict(note="") == (0, "ok")
    status, message = verdict(note="", trouble="database_error")
    assert status == 1
    assert message.startswith("polluxd takes no action: the database refuses")
    status, message = verdict(note="", durations={"observe_s": 40.0, "decide_s": 30.0})
    assert status == 2
    assert "longer than cycle.interval_s" in message
