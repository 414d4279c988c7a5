"""Rows are bounded as rows: a report, what a user's jobs report on a day, the answer to a question."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from polluxd.gateway.payloads import Acknowledgement
from polluxd.gateway.records import Holder
from polluxd.model import NO_PLACEMENT, JobState, Placement, Step
from polluxd.store import gateway_statements, people
from tests.integration.store.conftest import RefusedByStore
from tests.unit.slurm.squeue_stand_in import RUNNING
from tests.unit.slurm.squeue_stand_in import queue as squeue

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
WHOLE |= {"resize_refused": {"id": 4, "why": "sbatch: error: Batch job submission failed"}}
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


def test_moves_of_one_job_make_no_decision_long_and_hide_none_of_anothers(store, seen, postgres, cluster):
    """Whoever requeues a job as soon as it trains makes thousands a day."""
    store.sync_jobs([seen(7), seen(9)])
    place, times = '{"nodes": ["n1"], "gpus_per_node": 1}', '{"planned": 4e9, "training": 4e9}'
    postgres.execute(
        "SET session_replication_role = replica; INSERT INTO pollux.move"  # without triggers
        " (cluster, job_id, attempt, path, source, target, reason, step, times, epoch)"
        f" SELECT '{cluster}', CASE WHEN n = 1 THEN 7 ELSE 9 END, 1, 'requeue', '{place}', '{place}', '',"
        f" 'training', '{times}', 1 FROM generate_series(1, 20500) n"
    )
    assert len(store.move_costs(7)) == 1
    totals = store.records(restarts_since=0.0).totals
    assert (totals[7].count, totals[9].count) == (1, 200)


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


SLURMS, OURS, ADMINISTRATORS = (
    "a name of Slurm's, given by administrators",
    "polluxd's own words",
    "administrators alone",
)
HOOK, QUEUE, MODELS = "slurm_hooks", "polluxd/slurm/queue.py", "polluxd/gateway/payloads.py"
COLUMNS: dict[str, tuple[str, int]] = {
    "acknowledgement.facts": (MODELS, 1500),
    "allocation.explanation": (OURS, 4096),
    "allocation.nodes": (SLURMS, 0),
    "allocation.reason": ("what a report says of itself, and " + OURS, 1024),
    "boots.seen": (OURS, 0),
    "cycle.durations": (OURS, 0),
    "cycle.mode": (OURS, 0),
    "cycle.note": ("names of at most 5 records, and " + OURS, 4096),
    "cycle.plan_digest": (OURS, 0),
    "cycle.snapshot": ("COLUMNS of each job that has not ended", 0),
    "cycle.solver": (OURS, 0),
    "fingerprint.fingerprint": (MODELS, 64),
    "fingerprint.gpu_type": (MODELS, 64),
    "forecast.foretold": ("polluxd.forecast.courses, at most 400 jobs of some numbers", 0),
    "job.account": (SLURMS, 0),
    "job.left_alone": (OURS, 1024),
    "job.name": (QUEUE, 4 * 64 + 24),
    "job.nodes": (SLURMS, 0),
    "job.partition": (HOOK, 1024),
    "job.pinned_by": (ADMINISTRATORS, 0),
    "job.slurm_reason": ("Slurm's own words", 0),
    "job.slurm_state": ("Slurm's own words", 0),
    "job.spec": (HOOK, 2048),
    "job.state": (OURS, 0),
    "job.user_name": (SLURMS, 0),
    "leader.holder": (OURS, 0),
    "move.acknowledged": ("acknowledgement.facts", 1500),
    "move.cancelled_by": (ADMINISTRATORS, 0),
    "move.detail": ("report_history.report, and " + OURS, 2048),
    "move.nonce": (OURS, 0),
    "move.path": (OURS, 0),
    "move.reason": ("allocation.reason", 1024),
    "move.resumed": ("report_history.report", 2048),
    "move.source": (SLURMS, 0),
    "move.step": (OURS, 0),
    "move.target": (SLURMS, 0),
    "move.times": (OURS, 0),
    "prior.fingerprint": (MODELS, 64),
    "prior.gpu_type": (MODELS, 64),
    "prior.params": ("report_history.report", 4096),
    "rental.account": (SLURMS, 0),
    "rental.type": (SLURMS, 0),
    "rental.user_name": (SLURMS, 0),
    "report_history.report": ("sql/queries.sql, store_reports", 2 * 2048),
    "schema_migration.checksum": (OURS, 0),
    "schema_migration.name": (OURS, 0),
    "setting.name": (ADMINISTRATORS, 0),
    "setting.value": (ADMINISTRATORS, 0),
    "setting_audit.from_value": (ADMINISTRATORS, 0),
    "setting_audit.name": (ADMINISTRATORS, 0),
    "setting_audit.to_value": (ADMINISTRATORS, 0),
    "setting_audit.who": (ADMINISTRATORS, 0),
    "token.hash": (OURS, 66),
}
"""Of each column with text, JSON or lists: who bounds what a user's act puts there, and the most bytes of its text.

0: no act of a user does. A new column needs a line here.
"""
ROWS = {
    "report_history": "120 a minute and job; 250,000 and 256 MiB a user and day, then one in 5 minutes and job",
    "reported": "1 a user and day",
    "token": "172,860 a user and day (2 a second); the newest 8 of an attempt and of a user stay",
    "acknowledgement": "1 a move",
    "fingerprint": "20 an attempt",
    "prior": "1,000 a user",
    "job": "those that Slurm takes (MaxSubmitJobs); a task of an array once it is started",
    "move": "cycle.interval_s and moves.cooldown_s of polluxd; of a job 200 are read",
    "allocation": "1 a job and decision that differs",
    "cycle": "decisions of polluxd",
    "rental": "1 a job, day and type of node",
}
"""What one user can add, and who bounds it."""


def test_each_column_and_table_says_who_bounds_it(postgres):
    found = postgres.execute(
        "SELECT c.table_name || '.' || c.column_name FROM information_schema.columns c JOIN information_schema.tables t"
        " USING (table_schema, table_name) WHERE table_schema = 'pollux' AND t.table_type = 'BASE TABLE'"
        " AND c.data_type IN ('text', 'jsonb', 'json', 'ARRAY', 'bytea') AND c.column_name <> 'cluster'"
    )
    assert {name for (name,) in found} == set(COLUMNS)
    tables = {column.partition(".")[0] for column, (_, most) in COLUMNS.items() if most}
    assert tables <= set(ROWS)


def test_a_user_who_makes_all_as_long_as_may_be_fills_no_column_beyond_its_bound(
    store, agent, report, records, postgres, cluster, epoch
):
    types = ",".join(f"{letter}{'x' * 63}" for letter in "abcdefg")
    nodes = ",".join(f"n{number}" for number in range(60))
    words = f"gpu-types={types} constraint={'f' * 512} nodelist={nodes} exclude={nodes}"
    hostile = RUNNING | {
        "JobID": "7",
        "ArrayJobID": "4294967294",
        "ArrayTaskID": "4000000",
        "Name": "\U0001f600" * 1024,
        "admin_comment": f"pollux:v1 min-gpus=1 gpu-counts={','.join(map(str, range(1, 65)))} cpus-per-gpu=2 {words}"
        f" submitted=1795271000 asked=1x1",
    }
    (job,) = squeue(hostile).jobs
    assert 1500 < len(job.admin_comment) <= 2048
    assert job.spec is not None
    store.sync_jobs([job])
    at = TIMES | {"first_step_at": 1795816943.9}
    training = agent(7, attempt=1)
    said = {"immovable": "\U0001f600" * 200, "resize_refused": {"id": 9, "why": "é" * 300}}
    training.publish(report(times=at, gpu_type="g" * 64, **said))
    holder = Holder(1000, 7, 1)
    assert records.introduce(holder, "ab" * 32, "g" * 64) is None
    move = store.plan_move(7, 1, "requeue", NO_PLACEMENT, Placement(("n1",), 4), "r", epoch)
    assert store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    facts = {name: 5e-324 for name in ("last_step_at", "stopped_at", "checkpoint_s", "step")}
    assert records.acknowledge(holder, move.id, Acknowledgement(move=move.id, **facts).facts()) is True
    store.take_in()
    store.remember_fits()
    for column, (_, most) in COLUMNS.items():
        table, _, name = column.partition(".")
        if most and table not in ("allocation", "cycle"):
            ((longest,),) = postgres.execute(
                f"SELECT coalesce(max(octet_length({name}::text)), 0) FROM pollux.{table} WHERE cluster = '{cluster}'"
            )
            assert longest <= most, (column, longest)
            print(column, longest)
