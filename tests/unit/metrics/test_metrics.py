"""What polluxd tells Prometheus, over the cluster in memory."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pollux.goodput import BatchLimits
from polluxd.apply.idle_watch import IdleGpus
from polluxd.apply.reconciler import Reconciler
from polluxd.config.settings import MoveSettings
from polluxd.cycle.controller import Controller
from polluxd.errors import SlurmGarbled, SlurmRefused, SlurmUnavailable, StoreUnavailable
from polluxd.metrics import CLUSTER_GAUGES, Metrics, timed_slurm
from polluxd.metrics.cluster_view import STALE_S, of_idle, of_moves, of_reports
from polluxd.metrics.declared import (
    CYCLE_RESULTS,
    DATABASE_ERRORS,
    MOVE_PATHS,
    MOVE_RESULTS,
    PHASES,
    SLURM_CALLS,
)
from polluxd.model import JobSpec, Node, Report, Step
from polluxd.slurm.fake import FakeSlurm
from polluxd.store import Store
from polluxd.store.fake import FakeRows
from tests.troubled_store import TroubledStore
from tests.unit.apply.world import config

HOSTILE = 'evil"} 1\n# TYPE x counter\x1b[2J'


def samples(metrics: Metrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Every sample by name and values of labels."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    return found


class Cluster:
    """One polluxd, with its metrics, over a Slurm and a database in memory."""

    def __init__(self) -> None:
        self.slurm = FakeSlurm(
            [Node("n1", 4, cpus=64), Node("n2", 4, cpus=64), Node("n3", 4, schedulable=False)]
        )
        self.rows = FakeRows(self.slurm.clock)
        self.store = TroubledStore(self.rows)
        self.metrics = Metrics("1.2.3")
        timed = timed_slurm(self.slurm, self.metrics)
        store: Any = self.store
        reconciler = Reconciler(
            timed,
            store,
            limits=MoveSettings(),
            lease=60.0,
            authorize=lambda: self.store.epoch or 0,
            ended=lambda move, result, seconds: self.metrics.move_over(move.path, result, seconds),
            clock=self.slurm.clock,
            monotonic=self.slurm.clock,
        )
        self.controller = Controller(
            config(), timed, store, reconciler, monotonic=self.slurm.clock, metrics=self.metrics
        )

    def live(self, seconds: int) -> None:
        for _ in range(seconds):
            self.store.lead()
            self.controller.step()
            self.slurm.advance(1.0)


def test_every_series_begins_at_zero_and_every_value_of_a_label_is_a_word_of_polluxds() -> None:
    shown = samples(Metrics("1.2.3"))
    assert all(name.startswith("polluxd_") for name in shown)
    assert {labels for labels in shown["polluxd_cycles_total"]} == {(result,) for result in CYCLE_RESULTS}
    assert set(shown["polluxd_moves_total"]) == {(p, r) for p in MOVE_PATHS for r in MOVE_RESULTS}
    assert set(shown["polluxd_database_errors_total"]) == {(kind,) for kind in DATABASE_ERRORS}
    assert set(shown["polluxd_cycle_phase_duration_seconds_count"]) == {(phase,) for phase in PHASES}
    assert "1.2.3" in shown["polluxd_build_info"].popitem()[0]
    assert not any(name in shown for name in CLUSTER_GAUGES)


def test_a_decision_shows_jobs_gpus_reports_and_the_plan() -> None:
    cluster = Cluster()
    cluster.slurm.submit(None, gpus_per_node=2)
    cluster.slurm.advance(2.0)
    first = cluster.slurm.submit(JobSpec(), lease=60.0, name=HOSTILE, user=HOSTILE)
    cluster.live(8)
    shown = samples(cluster.metrics)
    assert cluster.slurm.truth(first).gpus_per_node_held
    held = sum(cluster.slurm.truth(first).gpus_per_node_held.values())
    assert shown["polluxd_gpus"] == {("pollux",): held, ("other",): 2, ("free",): 6 - held, ("closed",): 4}
    assert shown["polluxd_jobs"][("RUNNING",)] == 1
    assert shown["polluxd_reports"] == {
        ("missing",): 1, ("fresh",): 0, ("stale",): 0, ("rejected",): 0, ("doubted",): 0
    }  # fmt: skip
    assert shown["polluxd_open_moves"][("started",)] == 1
    assert set(shown["polluxd_stuck"].values()) == {0}
    assert shown["polluxd_paused"] == {(): 0}
    assert shown["polluxd_last_successful_cycle_timestamp_seconds"][()] <= cluster.slurm.clock()
    assert shown["polluxd_solver_gap_ratio"][()] >= 0
    assert shown["polluxd_cycle_phase_duration_seconds_count"][("decide",)] >= 2
    assert shown["polluxd_slurm_call_duration_seconds_count"][("configure", "ok")] == 1
    assert "evil" not in generate_latest(cluster.metrics.registry).decode()


def test_a_move_is_counted_with_its_path_its_result_and_the_time_since_its_plan() -> None:
    cluster = Cluster()
    job = cluster.slurm.submit(JobSpec(), lease=60.0)
    cluster.live(20)
    started = cluster.slurm.truth(job).start_time
    cluster.rows.reports[job] = Report(
        attempt=0, at=cluster.slurm.clock(), limits=BatchLimits(32, 256, 8, 64), first_step_at=started
    )
    cluster.live(5)
    shown = samples(cluster.metrics)
    assert shown["polluxd_moves_total"][("start", "completed")] == 1
    assert shown["polluxd_moves_total"][("start", "failed")] == 0
    (move,) = (move for move in cluster.rows.moves if move.path == "start")
    took = move.times[Step.TRAINING] - move.times[Step.PLANNED]
    assert took > 15
    assert shown["polluxd_move_duration_seconds_sum"][("start",)] == pytest.approx(took)


def test_a_move_that_fails_has_no_duration() -> None:
    cluster = Cluster()
    job = cluster.slurm.submit(JobSpec(), lease=60.0)
    cluster.live(3)
    cluster.slurm.finish(job)
    cluster.live(3)
    shown = samples(cluster.metrics)
    assert (
        shown["polluxd_moves_total"][("start", "failed")]
        + shown["polluxd_moves_total"][("start", "withdrawn")]
        == 1
    )
    assert sum(shown["polluxd_move_duration_seconds_count"].values()) == 0


def test_reports_are_told_apart_and_only_fresh_ones_count_in_the_goodput() -> None:
    slurm = FakeSlurm([Node("n1", 8, cpus=64)])
    jobs = [slurm.submit(JobSpec(), lease=0.0) for _ in range(5)]
    slurm.advance(5.0)
    state = slurm.observe()
    fresh, stale, missing, rejected, doubted = jobs
    limits = BatchLimits(32, 256, 8, 64)
    now = state.taken_at
    reports = {
        fresh: Report(0, now - 30, limits, goodput=100.0),
        stale: Report(0, now - STALE_S - 1, limits, goodput=1000.0),
        missing: Report(1, now, limits, goodput=1000.0),  # of another attempt
        doubted: Report(0, now, limits, goodput=10.0),
    }
    shown = of_reports(state, reports, {rejected: "NaN"}, {doubted: ("progress",)})
    assert shown["polluxd_reports"] == dict.fromkeys(("fresh", "stale", "missing", "rejected", "doubted"), 1)
    assert shown["polluxd_goodput_examples_per_second"] == {"": 110.0}


def test_what_is_stuck_is_counted_by_reason() -> None:
    shown = of_moves([], [], ["account", "account", "licenses"])
    assert shown["polluxd_stuck"] == {"account": 2, "licenses": 1, "move": 0}
    assert set(shown["polluxd_stuck"]) <= set(CLUSTER_GAUGES["polluxd_stuck"].values)


def test_jobs_beside_idle_gpus_are_counted_by_whether_a_reason_explains_it() -> None:
    metrics = Metrics("1.2.3")
    metrics.cluster.show(
        of_idle([IdleGpus(1, 4, 0.0, "a ceiling", True), IdleGpus(2, 8, 9.0, "nodes", False)])
    )
    gauge = "polluxd_jobs_beside_idle_gpus"
    assert samples(metrics)[gauge] == {("explained",): 1.0, ("unexplained",): 1.0}
    metrics.cluster.show(of_idle([IdleGpus(1, 4, 0.0, "a ceiling", True)]))
    assert samples(metrics)[gauge] == {("explained",): 1.0, ("unexplained",): 0.0}


def test_a_standby_shows_nothing_of_the_cluster() -> None:
    cluster = Cluster()
    cluster.live(2)
    assert "polluxd_jobs" in samples(cluster.metrics)
    cluster.metrics.cycle_over("standby", leads=False)
    shown = samples(cluster.metrics)
    assert not any(name in shown for name in CLUSTER_GAUGES)
    assert shown["polluxd_is_leader"] == {(): 0}
    assert shown["polluxd_cycles_total"][("standby",)] == 1


@pytest.mark.parametrize(
    ("error", "result"),
    [(SlurmUnavailable, "unavailable"), (SlurmRefused, "refused"), (SlurmGarbled, "garbled")],
)
def test_a_request_to_slurm_that_fails_is_measured_too(error: type[Exception], result: str) -> None:
    class Failing:
        def requeue(self, job_id: int) -> None:
            raise error("said")

    metrics = Metrics()
    seconds = iter((1.0, 3.5))
    client: Any = Failing()
    with pytest.raises(error):
        timed_slurm(client, metrics, clock=lambda: next(seconds)).requeue(7)
    shown = samples(metrics)["polluxd_slurm_call_duration_seconds_sum"]
    assert shown.pop(("requeue", result)) == 2.5
    assert set(shown.values()) == {0}


def test_a_timed_client_measures_every_request_that_goes_to_slurm() -> None:
    assert (
        " ".join(SLURM_CALLS)
        == "observe jobs requeue run_again configure release limit_time probe ask_limits shrink cancel "
        "renew"
    )
    slurm = FakeSlurm([])
    timed = timed_slurm(slurm, Metrics())
    assert timed.can_shrink == slurm.can_shrink
    assert all(getattr(timed, name) != getattr(slurm, name) for name in SLURM_CALLS)


def test_a_database_that_does_not_answer_is_counted() -> None:
    metrics = Metrics()
    store = Store("postgresql://pollux_daemon@127.0.0.1:1/pollux", "c")
    store.watch_failures(metrics.database_failed)
    with pytest.raises(StoreUnavailable):
        store.settings()
    with pytest.raises(StoreUnavailable):
        store.lead()
    store.close()
    assert samples(metrics)["polluxd_database_errors_total"][("unavailable",)] == 2
