"""Rows are bounded as rows: a report, what a user's jobs report on a day, the answer to a question."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from polluxd.gateway.records import Holder
from polluxd.model import NO_PLACEMENT, JobState, Placement
from polluxd.store import gateway_statements, people
from tests.integration.store.conftest import RefusedByStore

pytestmark = pytest.mark.slurm

WHOLE = {
    "mode": "advise",
    "resize": "in-place",
    "resized": 3,
    "gpu_type": "a100",
    "data_wait": 0.5,
    "search_rank": 0.5,
}
WHOLE |= {"measured_gpus": 4, "measured_nodes": 1, "prior_gpus": 2, "prior_nodes": 1, "prior_refuted": False}
WHOLE |= {
    "advice": {"batch_size": 4, "local_batch": 4, "accumulation": 0, "goodput_ratio": 1.5},
    "resize_cost": 1.5,
}
WHOLE |= {
    "resize_refused": {"id": 4, "why": "sbatch: error: Batch job submission failed"},
    "restart_cost": 31.123456,
}
WHOLE |= {"local_max_by_type": {"": 64, "a100": 8, "v100": 16}}
TIMES = dict.fromkeys(
    ("launched_at", "imported_at", "rendezvous_at", "attached_at", "restored_at"), 1795816943.4882038
)


def row_bytes(postgres, cluster):
    return [
        n
        for (n,) in postgres.execute(
            f"SELECT pg_column_size(r) FROM pollux.report_history r WHERE cluster = '{cluster}'"
        )
    ]


def test_a_report_of_all_members_fits(agent, report, postgres, cluster):
    fit = report()["params"] | {"alpha_rack": 0.123456789012, "beta_rack": 0.0012345678901}
    agent(7).publish(report(params=fit, times=TIMES | {"first_step_at": 1795816943.9}, **WHOLE))
    (size,) = row_bytes(postgres, cluster)
    assert 1000 < size <= 2048


@pytest.mark.parametrize(
    "fat",
    [
        {"local_max_by_type": {f"{n}" * 64: 1 for n in range(8)}, "resize_refused": {"id": 1, "why": "x" * 300}},
        {"local_max_by_type": {f"{n}" * 64: 1 for n in range(8)}, "gpu_type": "y" * 64},
        {"noise": {"sqr": 5e-324, "var": 1.7976931348623157}, "resize_refused": {"id": 9, "why": "é" * 300}},
        {"noise": {"sqr": 5e-324, "var": 5e-324}, "params": dict.fromkeys(("alpha_grad", "beta_grad", "alpha_local",
            "beta_local", "alpha_node", "beta_node", "alpha_rack", "beta_rack"), 5e-324) | {"gamma": 1.5}},
    ],
)  # fmt: skip
def test_a_fat_report_is_refused_or_small(agent, report, postgres, cluster, fat):
    sent = report(times=TIMES, **(WHOLE | fat))
    with suppress(RefusedByStore):
        agent(7).publish(sent)
    assert all(size <= 2048 for size in row_bytes(postgres, cluster))


def test_a_row_is_bounded_as_it_is_read_too(agent, report, postgres, cluster):
    """Postgres stores the least number in ten bytes, and writes it in 326."""
    fit = dict.fromkeys((*report()["params"], "alpha_rack", "beta_rack"), 5e-324) | {"gamma": 1.5}
    small = {
        "goodput": 5e-324,
        "throughput": 5e-324,
        "progress": 5e-324,
        "epoch": 5e-324,
        "lr_factor": 5e-324,
    }
    with pytest.raises(RefusedByStore, match="too-long"):
        agent(7).publish(report(params=fit, **small))
    agent(7).publish(report(params=report()["params"] | {"alpha_grad": 5e-324, "beta_grad": 5e-324}))
    assert len(row_bytes(postgres, cluster)) == 1


def test_a_user_has_a_bound_per_day_and_status_shows_it(store, agent, report, postgres, cluster, monkeypatch):
    monkeypatch.setattr(gateway_statements, "MOST_REPORTS", 3)
    for job_id in (7, 7, 8):
        agent(job_id).publish()
    for job_id in (7, 8):
        with pytest.raises(RefusedByStore, match="too-much"):
            agent(job_id).publish()
    agent(9).publish()  # its first report
    agent(20, uid=2000).publish()  # another user's
    (most, other) = store.reported()
    assert (most["uid"], most["reports"], other["uid"], other["reports"]) == (1000, 4, 2000, 1)
    assert most["bytes"] >= sum(row_bytes(postgres, cluster)) - row_bytes(postgres, cluster)[-1]
    postgres.execute(
        f"UPDATE pollux.report_history SET received_at = now() - interval '6 min' WHERE cluster = '{cluster}'"
    )
    agent(7).publish()
    postgres.execute(f"UPDATE pollux.reported SET day = day - 1 WHERE cluster = '{cluster}'")
    agent(7).publish()


def test_bytes_are_bounded_too(agent, monkeypatch):
    monkeypatch.setattr(gateway_statements, "MOST_BYTES", 500)
    agent(7).publish()
    with pytest.raises(RefusedByStore, match="too-much"):
        agent(7).publish()


def test_a_job_that_never_started_says_nothing(store, records, seen):
    store.sync_jobs([seen(70, state=JobState.PENDING, gpus_per_node_held={})])
    assert records.attempt_of(70, 0) == (1000, "unknown")
    records.issue(Holder(1000, 70, 0), b"x" * 32)
    assert records.token_of(b"x" * 32)[1] == "unknown"
    assert records.acknowledge(Holder(1000, 70, 0), 1, {}) == "unknown"
    assert records.introduce(Holder(1000, 70, 0), "ab" * 16, "") == "unknown"
    store.sync_jobs([seen(70)])
    assert records.attempt_of(70, 0) == (1000, None)
    store.sync_jobs([seen(70, state=JobState.PENDING, gpus_per_node_held={}, restart_count=1)])
    assert records.attempt_of(70, 1) == (1000, None), "it has run before"


def test_a_job_that_polluxd_starts_is_known_at_once(store, records, seen, epoch):
    store.sync_jobs([seen(70, state=JobState.PENDING, gpus_per_node_held={})])
    store.plan_move(70, 0, "start", NO_PLACEMENT, Placement(("n1",), 4), "start", epoch)
    assert records.attempt_of(70, 0) == (1000, None)


def test_a_history_is_thinned_where_it_is_long(store, agent, postgres, cluster, monkeypatch):
    monkeypatch.setattr(people, "_POINTS", 50)
    agent(7).publish()
    for many in (49, 70):
        postgres.execute(
            "INSERT INTO pollux.report_history (cluster, job_id, attempt, uid, received_at, report)"
            f" SELECT cluster, job_id, attempt, uid, now() + n * interval '1 min', report"
            f" FROM pollux.report, generate_series(1, {many}) n WHERE cluster = '{cluster}'"
        )
        points = store.report_history(7)
        assert 25 <= len(points) <= 50
        assert points == sorted(points, key=lambda point: point.at)
        found = postgres.execute(f"SELECT received_at FROM pollux.report WHERE cluster = '{cluster}'")
        newest = found[0][0]
        assert points[-1].at == newest.timestamp()
    assert len(store.report_history(7, since=time.time() + 60 * 60)) <= 50


def test_a_day_of_the_worst_that_a_user_may_do_fills_so_much(agent, report, postgres, cluster):
    """The size is by computation, from rows of the largest size with their indexes, and two bounds of a user's day."""
    jobs, copies = 100, 2000  # jobs of the user that run all day
    types = {f"{n}" * 60: 1 for n in range(3)}
    agent(7).publish(report(times=TIMES, **(WHOLE | {"local_max_by_type": types})))
    sizes = "pg_total_relation_size('pollux.report_history')"
    ((before,),) = postgres.execute(f"SELECT {sizes}")
    postgres.execute(
        "INSERT INTO pollux.report_history (cluster, job_id, attempt, uid, report)"
        f" SELECT cluster, job_id, attempt, uid, report FROM pollux.report, generate_series(1, {copies})"
        f" WHERE cluster = '{cluster}'"
    )
    ((after, row),) = postgres.execute(
        f"SELECT {sizes}, max(pg_column_size(r)) FROM pollux.report_history r WHERE cluster = '{cluster}'"
    )
    assert 1500 < row <= 2048
    each = (after - before) / copies
    assert each <= 3 * 1024, "a row of 2 kB, its share of pages of 8 kB, two indexes"
    at_full_rate = min(gateway_statements.MOST_REPORTS, gateway_statements.MOST_BYTES / row)
    day = (at_full_rate + jobs * 24 * 12) * each
    assert day < 600 * 2**20, (
        "600 MiB a day for a user with 100 jobs, whatever they send; 2.7 GB for one job before"
    )
    print(f"{row} bytes a row, {each:.0f} with pages and indexes: {day / 2**20:.0f} MiB a day")
