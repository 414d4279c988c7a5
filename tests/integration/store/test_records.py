"""Jobs, cycles, settings: what is remembered, and what people read."""

from __future__ import annotations

import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import psycopg2
import pytest

from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError, StoreRejected
from polluxd.forecast import service
from polluxd.model import NO_PLACEMENT, Allocation, Explanation, JobSpec, JobState, Placement, Plan, Step
from polluxd.model.snapshot_json import to_json
from tests.build import config, job, nodes, running, snapshot
from tests.build import report as sound_report

pytestmark = pytest.mark.slurm

N1 = Placement(("n1",), 4)


def plan(*allocations, objective=1.0):
    return Plan(allocations, objective=objective, upper_bound=2.0, solver="counts")


def record(store, *allocations, **more):
    """Record a cycle that decided so; return its number."""
    words = {"mode": "enforce", "durations": {}, "started_at": time.time(), **more}
    return store.record_cycle(plan(*allocations), **words)


def test_a_jobs_life(store, seen):
    now = time.time()
    spec = JobSpec(min_gpus=2, max_gpus=8, adaptive=False)
    waiting = seen(
        *(7,),
        state=JobState.PENDING,
        submit_time=now - 50,
        start_time=now + 300,
        gpus_per_node_held={},
        spec=spec,
    )
    store.sync_jobs([waiting])
    (row,) = store.jobs_view()
    assert (row.state, row.gpus, row.started_at, row.spec) == ("PENDING", 0, None, spec)
    # A requeue resets Slurm's submit time; ours stays the first.
    store.sync_jobs([seen(7, restart_count=1, submit_time=now - 20, start_time=now - 10, spec=spec)])
    (row,) = store.jobs_view()
    assert (row.state, row.gpus, row.nodes, row.attempt) == ("RUNNING", 4, ("n1",), 1)
    assert row.submitted_at == pytest.approx(now - 50)
    assert row.started_at == pytest.approx(now - 10)
    for why in ("it is outside of the scope", ""):
        store.sync_jobs([seen(7, restart_count=1, submit_time=now - 20, spec=spec, left_alone=why)])
        assert [row.left_alone for row in store.jobs_view()] == [why]
    ended = seen(7, state=JobState.FAILED, restart_count=1, end_time=now - 1, submit_time=now - 20)
    store.sync_jobs([ended])
    store.sync_jobs([])  # Slurm forgets it
    (row,) = store.jobs_view()
    assert (row.state, row.gpus, row.ended_at) == ("FAILED", 0, pytest.approx(now - 1))
    assert store.jobs_view(ended=False) == []


def test_what_rented_nodes_cost_is_added_up_by_day_and_outlives_a_process(
    store, new_store, postgres, cluster
):
    store.lead()
    priced = PolicySettings(cloud_prices={"big": 1.0})
    now = time.time()
    today, row = time.strftime("%Y-%m-%d", time.gmtime(now)), {"type": "big", "user_name": "ada", "job_id": 7}
    row |= {"day": today, "account": "lab", "node_seconds": 60.0, "gpu_seconds": 240.0, "cost": 1.5}
    row["saved_seconds"] = -5.0
    assert store.records(priced).rent is None
    for at in (now - 30, now):
        store.record_rentals([row, {**row, "account": "", "user_name": "", "job_id": 0, "cost": 0.25}], at)
    store.record_rentals([{**row, "day": "2020-01-31", "cost": 100.0}], now)
    again = new_store()
    spent = again.records(priced).rent
    assert spent.month == {"lab": 3.0, "": 0.5}
    assert spent.counted_at == pytest.approx(now, abs=1e-3)
    assert again.records(PolicySettings()).rent is None
    found = [
        (r["job_id"], r["node_seconds"], r["cost"], r["saved_seconds"]) for r in again.rentals(now - 86400)
    ]
    assert found == [(0, 120.0, 0.5, -10.0), (7, 120.0, 3.0, -10.0)]
    assert again.rentals(0.0)[0]["day"] == "2020-01-31"
    store.prune(now, history_s=1e9, snapshots_s=1e9, jobs_s=1e9)
    assert {r["day"] for r in again.rentals(0.0)} == {today}
    with pytest.raises(StoreRejected):
        store.record_rentals([{**row, "cost": -1.0}], now)


def test_forecasts_are_kept_newest_first_and_ended_jobs_with_their_last_report(
    store, new_store, seen, agent, report
):
    now = time.time()
    store.sync_jobs([seen(7, submit_time=now - 50, start_time=now - 40), seen(8)])
    agent(7).publish(report(progress=12.5))
    store.sync_jobs([seen(8)])
    (ended,) = store.ended_jobs(now - 60, 10)
    assert (ended.job_id, ended.spec, ended.report.progress) == (7, seen(7).spec, 12.5)
    assert ended.seconds == pytest.approx(40, abs=20)
    assert store.ended_jobs(now + 60, 10) == []
    for cycle in (1, 2, 2):
        store.record_forecast(cycle, {"cycle": cycle, "at": now, "jobs": []})
    assert [run["cycle"] for run in new_store().forecasts(5)] == [2, 1]
    assert new_store(name="another").forecasts() == []


def test_a_run_beside_polluxd_forecasts_the_newest_decision(store, postgres, cluster):
    one = running(7, ["n000"], 4, report=sound_report(progress=0.0, target=1e4))
    made = snapshot(nodes(1), [one])
    cycle = record(store, Allocation(7, N1, 1.0, 1.0, 64, False, ""), snapshot_json=lambda: to_json(made))
    loaded = config(mode="enforce", slurm={"cluster": cluster}, database={"url": postgres.url})
    service.run(loaded, rest=bool)
    (kept,) = store.forecasts()
    assert (kept["cycle"], kept["jobs"][0]["job_id"], kept["jobs"][0]["by"]) == (cycle, 7, "declared")
    assert made.taken_at < kept["jobs"][0]["told"]["last"]


def test_boots_of_nodes_outlive_a_process(store, new_store):
    store.lead()
    assert store.boots() == {}
    for seen in ({"since": {}}, {"since": {"c1": 1.5}}):
        store.record_boots(seen)
    assert new_store().boots() == {"since": {"c1": 1.5}}


def test_jobs_of_one_user_and_those_that_ended_lately(store, seen):
    store.sync_jobs([seen(7), seen(8, uid=2000), seen(9)])
    store.sync_jobs([seen(8, uid=2000)])

    def found(**which):
        return [row.job_id for row in store.jobs_view(**which)]

    assert (found(), found(ended=False), found(uid=1000)) == ([7, 8, 9], [8], [7, 9])
    assert (found(since=time.time() - 60), found(since=time.time() + 60)) == ([7, 8, 9], [8])
    assert (found(most=2), found(uid=2000, ended=False), found(uid=1000, most=1)) == ([8, 9], [8], [9])


def test_a_job_that_ended_unseen_is_gone_and_may_come_back(store, seen):
    store.sync_jobs([seen(7), seen(8)])
    store.sync_jobs([seen(8)])
    assert {row.job_id: row.state for row in store.jobs_view()} == {7: "GONE", 8: "RUNNING"}
    store.sync_jobs([seen(7), seen(8)])
    assert {row.job_id: row.ended_at for row in store.jobs_view()} == {7: None, 8: None}


def test_what_a_requeue_makes_slurm_forget(store, seen):
    now = time.time()
    store.sync_jobs([seen(7, submit_time=now - 100, start_time=now - 90)])
    held = store.records(restarts_since=0.0).times[7].held_at
    assert held == pytest.approx(now, abs=60)
    store.sync_jobs(
        [
            seen(
                7,
                state=JobState.PENDING,
                submit_time=now,
                start_time=None,
                gpus_per_node_held={},
                restart_count=1,
            )
        ]
    )
    times = store.records(restarts_since=0.0).times[7]
    assert (times.submitted_at, times.started_at) == (pytest.approx(now - 100), pytest.approx(now - 90))
    assert held <= times.held_at <= time.time() + 1  # when it was last seen to hold GPUs
    store.sync_jobs([seen(8, state=JobState.PENDING, start_time=None, gpus_per_node_held={})])
    assert store.records(restarts_since=0.0).times[8].held_at is None
    assert 7 not in store.records(restarts_since=0.0).times  # it has ended


def test_a_job_is_silent_until_this_attempt_reports_a_training_step(store, seen, agent, report):
    epoch, now = store.lead(), time.time()
    store.sync_jobs([seen(7, start_time=now - 900), seen(8, start_time=now - 900)])
    agent(7).publish(report(times={"launched_at": now - 800, "first_step_at": now - 790}))
    store.sync_jobs([seen(7, start_time=now - 900), seen(8, start_time=now - 900, restart_count=1)])
    move = store.plan_move(8, 1, "start", N1, N1, "x", epoch, at=now - 500)
    store.advance(move.id, Step.STARTED, now - 400, epoch=epoch)
    silent = {row.job_id: row.silent_since for row in store.jobs_view()}
    assert silent == {7: None, 8: pytest.approx(now - 400, abs=1)}
    agent(8, attempt=1).publish(report(times={"launched_at": now - 300}))
    silent = {row.job_id: row.silent_since for row in store.jobs_view()}
    assert silent[8] == pytest.approx(now, abs=60)
    waiting = seen(8, state=JobState.PENDING, gpus_per_node_held={}, restart_count=1)
    store.sync_jobs([waiting])
    assert {row.job_id: row.silent_since for row in store.jobs_view()} == {7: None, 8: None}


def test_jobs_that_are_not_ours_are_not_remembered(store, seen):
    store.sync_jobs([seen(7, spec=None)])
    assert store.jobs_view() == []


def test_a_job_id_used_again_inherits_nothing(store, seen, agent, epoch):
    now = time.time()
    store.sync_jobs([seen(7, restart_count=3, submit_time=now - 1000)])
    agent(7, attempt=3).publish()
    move = store.plan_move(7, 2, "requeue", N1, N1, "x", epoch, at=now - 500)
    store.advance(move.id, Step.TRAINING, now - 490, epoch=epoch)
    store.sync_jobs([seen(7, restart_count=0, name="another", submit_time=now - 5)])
    (row,) = store.jobs_view()
    assert (row.name, row.attempt, row.submitted_at, row.goodput) == (
        "another",
        0,
        pytest.approx(now - 5),
        None,
    )
    assert store.reports() == {}
    assert store.records(restarts_since=0.0).totals == {}
    agent(7).publish()
    assert store.reports()[7].attempt == 0


def test_clusters_do_not_see_each_other(store, new_store, seen, agent, cluster):
    store.sync_jobs([seen(7)])
    agent(7).publish()
    store.set_settings({"paused": True}, "root")
    other = new_store(name=cluster + "b")
    assert other.jobs_view() == []
    assert other.reports() == {}
    assert other.settings() == PolicySettings()
    assert other.lead() is not None
    assert store.lead() is not None


def test_a_cycle_and_its_decisions_are_read_back(store, seen, agent):
    store.sync_jobs([seen(7), seen(8)])
    agent(7).publish()
    why = Explanation(fair_nodes=1, fair_gpus=2, weight=1.5, limit="contention", next_gpus=8, taken_by=8)
    staying = Allocation(7, N1, 90.0, 1.25, 128, False, "stays: no better placement", why)
    growing = Allocation(8, Placement(("n2", "n3"), 4), math.inf, 2.5, 256, True, "grows to 8 GPUs")
    number = store.record_cycle(
        plan(staying, growing, objective=-math.inf),
        mode="advise",
        note="n",
        durations={"decide_s": 0.5},
        started_at=time.time(),
        snapshot_json=lambda: '{"nodes": 4}',
    )
    cycle = store.latest_cycle()
    assert (cycle.id, cycle.mode, cycle.note, cycle.solver) == (number, "advise", "n", "counts")
    assert (cycle.objective, cycle.upper_bound, cycle.durations) == (None, 2.0, {"decide_s": 0.5})
    assert store.cycle_snapshot(number) == {"nodes": 4}
    got = store.allocations(number)
    assert got[0] == staying
    assert (got[1].placement, got[1].goodput) == (growing.placement, 0.0)  # infinity is not stored

    views = {row.job_id: row for row in store.jobs_view()}
    assert (views[7].speedup, views[7].decision_reason) == (1.25, staying.reason)
    assert (views[7].batch_size, views[7].goodput, views[7].fraction_done) == (128, 90.0, 0.02)
    assert (views[8].batch_size, views[8].fraction_done) == (None, None)
    told = store.explain(8)
    assert told.allocation.reason == "grows to 8 GPUs"
    assert told.cycle.id == number
    assert told.report is None
    assert store.explain(99) is None


def test_only_decisions_that_changed_are_written(store, new_store, seen):
    store.lead()
    store.sync_jobs([seen(7), seen(8)])
    stays = Allocation(7, N1, 90.0, 1.25, 128, False, "stays: 8 GPUs would bring 5 %")
    waits = Allocation(8, NO_PLACEMENT, 0.0, 0.0, 0, False, "waits")
    first = record(store, stays, waits)
    drifted = replace(stays, goodput=91.0, reason="stays: 8 GPUs would bring 6 %")
    second = record(store, drifted, waits)
    third = record(store, replace(waits, placement=N1, goodput=50.0, reason="starts"), drifted)
    fourth = record(store, drifted)

    def written() -> list[tuple[int, int]]:
        return sorted((a.job_id, cycle) for cycle in (first, second, third, fourth) for a in made(cycle))

    def made(cycle):
        return store.allocations(cycle, made_in_it=True)

    assert written() == [(7, first), (8, first), (8, third)]
    held = {cycle: store.allocations(cycle) for cycle in (first, second, third, fourth)}
    assert held[first] == held[second] == [stays, waits]
    assert [(a.job_id, a.reason) for a in held[third]] == [(7, stays.reason), (8, "starts")]
    assert held[fourth] == [stays]
    assert [(c.jobs, c.cycle.id) for c in store.cycles(4)] == [
        (1, fourth),
        (2, third),
        (2, second),
        (2, first),
    ]
    assert store.explain(7).cycle.id == fourth  # it holds
    assert store.explain(8).cycle.id == third
    # Small changes add up, and are then one.
    further = replace(stays, goodput=101.0)
    assert made(record(store, further)) == [further]
    # Another leader knows nothing of what is stored.
    another = new_store(lease_s=3600)
    store.resign()
    assert another.lead() is not None
    assert another.allocations(record(another, further), made_in_it=True) == [further]


def test_decisions_that_hold_are_not_pruned(store, seen):
    store.lead()
    store.sync_jobs([seen(7), seen(8)])
    now = time.time()
    stays = Allocation(7, N1, 90.0, 1.25, 128, False, "stays")
    gone = Allocation(8, N1, 90.0, 1.25, 128, False, "stays")
    cycles = [
        record(store, *decided, started_at=now - ago)
        for decided, ago in (((stays, gone), 9000), ((stays,), 8000), ((stays,), 50))
    ]
    store.prune(now, history_s=3600, snapshots_s=3600, jobs_s=1e6)
    assert store.cycle(cycles[1]) is None
    assert store.allocations(cycles[2]) == [stays]
    assert store.allocations(cycles[0]) == [
        stays
    ]  # the cycle stays for the decision that holds; that on job 8 went


def test_only_jobs_that_changed_are_written(store, seen, postgres, cluster):
    def versions() -> dict[int, str]:
        return dict(
            postgres.execute(f"SELECT job_id, xmin::text FROM pollux.job WHERE cluster = '{cluster}'")
        )

    store.lead()
    now = time.time()
    jobs = [seen(number, submit_time=now - 9, start_time=now - 8) for number in (7, 8)]
    store.sync_jobs(jobs)
    first = versions()
    store.sync_jobs(jobs)
    assert versions() == first
    store.sync_jobs([jobs[0], replace(jobs[1], reason="Prolog")])
    assert versions()[7] == first[7]
    assert versions()[8] != first[8]
    store.sync_jobs(jobs[:1])
    assert {row.job_id: row.state for row in store.jobs_view()} == {7: "RUNNING", 8: "GONE"}
    assert versions()[7] == first[7]
    assert store.records(restarts_since=0.0).times[7].held_at == pytest.approx(time.time(), abs=60)


def test_a_period_has_its_cycles_and_shows_who_had_the_gpus(store, seen):
    store.sync_jobs([seen(7), seen(8)])
    begin = time.time() // 15 * 15 - 990
    numbers = []
    jobs = [running(7, ["n000"], 4), job(8, JobSpec(min_gpus=2)), job(9, JobSpec(min_gpus=1))]
    shown = to_json(snapshot([*nodes(2), replace(nodes(3)[2], foreign_gpus=3)], jobs))
    words = {"mode": "observe", "snapshot_json": lambda: shown}
    for place, (at, speedup) in enumerate(((-10, 9.0), (10, 1.0), (20, 2.0), (2000, 9.0))):
        waits = Allocation(8, NO_PLACEMENT, 0.0, 0.5, 0, False, "waits")
        held = Allocation(7, N1, 90.0, speedup, 128, False, f"reason {place}")
        numbers.append(record(store, held, waits, started_at=begin + at, **words))
    unkept = record(store, started_at=begin + 50)
    assert [cycle.id for cycle in store.cycles_between(begin, begin + 100)] == [*numbers[1:3], unkept]
    assert [cycle.id for cycle in store.cycles_between(begin, begin + 100, kept=True)] == numbers[1:3]
    samples = store.cluster_over_time(begin, 15.0)
    assert [sample["speedup"] for sample in samples] == [1.0, 2.0, 9.0]
    used = {"gpus": 12, "plain": 3, "held": 4, "waiting": 3}
    assert all(sample | used == sample for sample in samples)


def test_a_cycle_without_a_decision_says_why(store):
    store.record_cycle(None, mode="enforce", note="Slurm is away", durations={}, started_at=time.time())
    assert (store.latest_cycle().solver, store.latest_cycle().note) == (None, "Slurm is away")


def test_the_view_shows_the_newest_move(store, seen, epoch):
    store.sync_jobs([seen(7)])
    for number in range(2):
        move = store.plan_move(7, number, "requeue", N1, N1, f"reason {number}", epoch)
        store.advance(move.id, Step.TRAINING, time.time(), epoch=epoch)
    store.plan_move(7, 2, "park", N1, NO_PLACEMENT, "others need the GPUs", epoch)
    (row,) = store.jobs_view()
    assert (row.moves, row.move_step) == (2, "planned")
    assert row.move_reason == "others need the GPUs"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("power", -math.inf),
        ("account_weights", {"physics": 2.0}),
        ("job_weights", {"17": 2.0}),
        ("paused", True),
        ("account_ceilings", {"physics": 16}),
        ("gpu_counts", "1,2,4,8"),
    ],
)
def test_settings_come_back_and_are_audited(store, name, value):
    assert getattr(store.settings(), name) == getattr(PolicySettings(), name)
    store.set_settings({name: value}, "root@head")
    store.set_settings({name: value}, "root@head")  # no change: no line in the audit
    assert getattr(store.settings(), name) == value
    (change,) = store.setting_audit()
    assert (change.who, change.name, change.from_value) == ("root@head", name, None)
    assert time.time() - change.at < 60


def test_settings_set_together_are_set_at_once(store):
    store.set_settings({"power": -2.0, "qos_weights": {"high": 4.0}}, "root@head")
    assert store.settings() == PolicySettings(power=-2.0, qos_weights={"high": 4.0})
    assert {change.name for change in store.setting_audit()} == {"power", "qos_weights"}
    with pytest.raises(ConfigError, match="hysteresis"):
        store.set_settings({"power": 1.0, "hysteresis": 7.0}, "root@head")
    with pytest.raises(StoreRejected):  # a name that only Postgres refuses, when the first is already written
        store.set_settings({"power": 1.0, "user_weights": {"a\0": 2.0}}, "root@head")
    assert store.settings() == PolicySettings(power=-2.0, qos_weights={"high": 4.0})
    assert len(store.setting_audit()) == 2


def test_settings_lie_over_the_configurations(store):
    defaults = PolicySettings(power=0.0, partial_nodes=True)
    store.set_settings({"power": -3}, "root")
    assert store.settings(defaults) == PolicySettings(power=-3, partial_nodes=True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("power", 2), ("power", math.nan), ("paused", "yes"), ("account_weights", {"a": 0}), ("colour", 1)],
)
def test_senseless_settings_are_refused(store, name, value):
    with pytest.raises(ConfigError, match=name):
        store.set_settings({name: value}, "root")
    assert store.setting_audit() == []


@pytest.mark.parametrize(("name", "value"), [("Power", "2"), ("user weights", "{}"), ("power", "[1]")])
def test_the_table_checks_names_and_shapes_and_audits_changes_by_hand(store, postgres, cluster, name, value):
    with pytest.raises(psycopg2.errors.CheckViolation):
        postgres.execute(f"INSERT INTO pollux.setting VALUES ('{cluster}', '{name}', '{value}')")
    postgres.execute(f"INSERT INTO pollux.setting VALUES ('{cluster}', 'paused', 'true')")
    assert [(c.who, c.name) for c in store.setting_audit()] == [("postgres", "paused")]


def test_pruning_forgets_the_old_and_keeps_the_rest(store, seen, agent, postgres, cluster, epoch):
    now = time.time()
    store.sync_jobs([seen(7, state=JobState.COMPLETED, end_time=now - 5000), seen(8)])
    agent(8).publish()
    move = store.plan_move(7, 0, "requeue", N1, N1, "x", epoch, at=now - 6000)
    store.advance(move.id, Step.TRAINING, now - 5990, epoch=epoch)
    store.plan_move(8, 0, "requeue", N1, N1, "x", epoch, at=now - 6000)
    words = {"mode": "enforce", "snapshot_json": lambda: "{}"}
    old = record(store, Allocation(8, N1, 1, 1, 32, False, "r"), started_at=now - 9000, **words)
    recent = record(store, started_at=now - 500, **words)
    latest = record(store, started_at=now - 10, **words)
    postgres.execute(
        f"UPDATE pollux.report_history SET received_at = now() - interval '2 h' WHERE cluster = '{cluster}'"
    )
    store.prune(now, history_s=3600, snapshots_s=100, jobs_s=3600)
    assert store.allocations(old) == []
    assert (store.cycle_snapshot(recent), store.cycle_snapshot(latest)) == (None, {})
    assert [row.job_id for row in store.jobs_view()] == [8]
    assert [m.job_id for m in store.moves()] == [8]
    assert [point.job_id for point in store.report_history()] == [8], "the latest of a job stays"
    assert set(store.reports()) == {8}


def test_of_mode_observe_one_snapshot_in_ten_is_kept_for_the_report(store, epoch):
    now = time.time()
    words = {"mode": "observe", "snapshot_json": lambda: "{}"}
    numbers = [record(store, started_at=now - 9000 + n, **words) for n in range(20)]
    assert [cycle.id for cycle in store.cycles_between(0.0, now, kept=True)] == numbers
    store.prune(now, history_s=1e6, snapshots_s=100, jobs_s=1e6)
    kept = [number for number in numbers if number % 10 == 0]
    assert [cycle.id for cycle in store.cycles_between(0.0, now, kept=True)] == kept
    assert len(kept) == 2


def test_a_cycle_is_recorded_without_a_snapshot_that_the_database_refuses(store, seen, caplog):
    store.sync_jobs([seen(7)])
    # jsonb refuses this character, as it refuses a text of more than 256 MB.
    snapshot = '{"x": "\\u0000"}'
    number = record(store, Allocation(7, N1, 1, 1, 32, False, "r"), snapshot_json=lambda: snapshot)
    assert store.latest_cycle().id == number
    assert store.cycle_snapshot(number) is None
    assert [a.job_id for a in store.allocations(number)] == [7]
    assert f"cycle {number} is recorded without its snapshot" in caplog.text


def test_the_lease_is_renewed_while_a_snapshot_takes_all_the_time_of_a_statement(new_store, postgres, seen):
    """The database takes longer over a snapshot than a statement may."""
    store = new_store(lease_s=60, statement_timeout=4)
    assert store.lead() is not None
    store.sync_jobs([seen(7)])
    slow = (
        "CREATE FUNCTION pollux.slow() RETURNS trigger LANGUAGE plpgsql AS"
        " 'BEGIN IF NEW.snapshot IS NOT NULL THEN PERFORM pg_sleep(60); END IF; RETURN NEW; END'",
        "CREATE TRIGGER slow BEFORE INSERT OR UPDATE ON pollux.cycle FOR EACH ROW EXECUTE FUNCTION pollux.slow()",
    )
    with closing(psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))) as admin:
        admin.autocommit = True
        cursor = admin.cursor()

        def sleeps():
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'")
            return cursor.fetchone()[0]

        try:
            for statement in slow:
                cursor.execute(statement)
            with ThreadPoolExecutor(1) as pool:
                decided = Allocation(7, N1, 1, 1, 32, False, "r")
                recording = pool.submit(record, store, decided, snapshot_json=lambda: "{}")
                while not sleeps():
                    assert not recording.done(), recording.exception()
                assert store.still_leading(), "the snapshot's statement holds the leader's row"
                number = recording.result()
        finally:
            cursor.execute(
                "DROP TRIGGER IF EXISTS slow ON pollux.cycle; DROP FUNCTION IF EXISTS pollux.slow()"
            )
    assert [a.job_id for a in store.allocations(number)] == [7]
    assert store.cycle_snapshot(number) is None


ADVICE = {"batch_size": 256, "local_batch": 64, "accumulation": 0, "goodput_ratio": 1.25}


def mode_and_advice(postgres, cluster):
    (found,) = postgres.execute(
        f"SELECT report ->> 'mode', report -> 'advice' FROM pollux.report WHERE cluster = '{cluster}'"
    )
    return found


def test_mode_and_advice_are_kept_and_go_again(store, agent, seen, report, postgres, cluster):
    store.sync_jobs([seen(7)])
    agent(7).publish(report())
    assert mode_and_advice(postgres, cluster) == (None, None), "an agent of an earlier version"
    agent(7).publish(report(mode="advise", advice=ADVICE))
    assert mode_and_advice(postgres, cluster) == ("advise", ADVICE)
    (row,) = store.jobs_view()
    assert (row.mode, row.advice) == ("advise", ADVICE)
    agent(7).publish(report(mode="enforce", advice=None))
    assert mode_and_advice(postgres, cluster) == ("enforce", None)
