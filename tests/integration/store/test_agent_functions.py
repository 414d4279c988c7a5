"""What a job can and cannot do through the three functions."""

from __future__ import annotations

import contextlib
import json
import threading
import time

import psycopg2
import psycopg2.errors
import pytest

from polluxd.model import NO_PLACEMENT, Placement, Step

pytestmark = pytest.mark.slurm

N1 = Placement(("n1",), 4)
N2 = Placement(("n2",), 4)


def refusal(call, *args, **words):
    with pytest.raises(psycopg2.Error) as caught:
        call(*args, **words)
    return caught.value.pgcode, caught.value.diag.message_primary


def test_a_report_arrives_as_it_was_sent(store, agent, seen, report):
    store.sync_jobs([seen(7)])
    body = report(times={"first_step_at": 1000.5}, restart_cost=4.25)
    assert agent(7).publish(body) == {"drain": None, "resize": None}
    got = store.reports()[7]
    assert (got.attempt, got.batch_size, got.goodput, got.target) == (0, 128, 90.0, 500.0)
    assert got.at == pytest.approx(body["at"], abs=60)
    assert got.params.gamma == 1.5
    assert got.noise.phi(32) == 96.0
    assert (got.limits.initial, got.limits.local_max) == (32, 256)
    assert (got.first_step_at, got.restart_cost) == (1000.5, 4.25)


def test_unmeasured_terms_stay_unknown(store, agent, report):
    agent(7).publish(report(params=None, noise=None, target=None))
    got = store.reports()[7]
    assert (got.params, got.noise, got.target, got.first_step_at) == (None, None, None, None)


def test_no_job_can_speak_for_another(store, agent, sign, cluster):
    stolen = sign(cluster, 7, 0, 1000)
    for forged in (
        agent(8, by=stolen),
        agent(7, attempt=1, by=stolen),
        agent(7, uid=1001, by=stolen),
        agent(7, by=stolen[:-1] + ("0" if stolen[-1] != "0" else "1")),
        agent(7, by=""),
        agent(7, by="x" * 10000),
        agent(7, by=sign(cluster, 7, 0, 1000, b"another secret of 32 bytes ......")),
    ):
        for call in (forged.publish, forged.instructions, lambda f=forged: f.acknowledge(1)):
            code, message = refusal(call)
            assert code == "PX401"
            assert stolen not in message
    assert store.reports() == {}


def test_null_credentials_are_refused(store, agent, cluster, sign):
    asking = agent(7)
    for hole in range(5):
        words = [cluster, 7, 0, 1000, sign(cluster, 7, 0, 1000)]
        words[hole] = None
        code, _ = refusal(asking.sql, "SELECT pollux.instructions_v1(%s, %s, %s, %s, %s)", *words)
        assert code in ("PX401", "PX503")


def test_an_attempt_that_is_over_is_refused(store, agent, seen):
    old, new = agent(7), agent(7, attempt=1)
    old.publish()
    new.publish()
    assert refusal(old.publish)[0] == "PX409"
    assert refusal(old.instructions)[0] == "PX409"
    assert store.reports()[7].attempt == 1


def test_slurms_own_word_ends_an_attempt_before_the_next_reports(store, agent, seen):
    store.sync_jobs([seen(7, restart_count=2)])
    assert refusal(agent(7, attempt=1).publish)[0] == "PX409"
    agent(7, attempt=2).publish()


def test_a_job_that_ended_is_refused(store, agent, seen):
    from polluxd.model import JobState

    store.sync_jobs([seen(7, state=JobState.COMPLETED, end_time=time.time())])
    assert "has ended" in refusal(agent(7).publish)[1]


def test_without_a_secret_nothing_is_accepted_yet(new_store, agent):
    new_store()
    with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
        agent(7)


def test_a_key_can_be_rotated(store, agent, cluster, sign):
    store.install_secret(b"the second secret, also 32 bytes..")
    agent(7).publish()  # signed with the first: running attempts go on
    store.install_secret(b"the third secret, also 32 bytes...")
    assert refusal(agent(7).publish)[0] == "PX401"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"goodput": -1}, "goodput"),
        ({"goodput": "NaN"}, "goodput"),
        ({"goodput": "Infinity"}, "goodput"),
        ({"goodput": None}, "goodput"),
        ({"goodput": True}, "goodput"),
        ({"goodput": 1e13}, "goodput"),
        ({"noise": {"sqr": -1e-9, "var": 1}}, "sqr"),
        ({"noise": {"sqr": 1}}, "var"),
        ({"noise": 3}, "noise"),
        ({"params": {"alpha_grad": 1}}, "beta_grad"),
        ({"limits": None}, "initial"),
        ({"limits": {"initial": 32, "maximum": 16, "local_min": 1, "local_max": 8}}, "maximum"),
        ({"gpus": -1}, "gpus"),
        ({"at": "now"}, "at"),
        ({"checkpointed": "yes"}, "checkpointed"),
        ({"times": [1]}, "times"),
        ({"times": {"launched_at": -1}}, "launched_at"),
        ({"times": {str(n): 1 for n in range(17)}}, "times"),
        ({"v": 2}, "version"),
        ({"padding": "x" * 20000}, "16 KiB"),
    ],
)
def test_unsound_numbers_are_refused_by_name(store, agent, report, change, named):
    code, message = refusal(agent(7).publish, report(**change))
    assert code == "PX422"
    assert named in message
    assert store.reports() == {}


@pytest.mark.parametrize("gamma", [0.99, 10.01])
def test_gamma_is_bounded(store, agent, report, gamma):
    body = report()
    body["params"]["gamma"] = gamma
    assert "gamma" in refusal(agent(7).publish, body)[1]


def test_a_clock_far_ahead_is_refused(store, agent, report):
    assert refusal(agent(7).publish, report(at=time.time() + 3600))[0] == "PX422"


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_literals_that_are_no_finite_number_are_refused(store, agent, report, literal):
    text = json.dumps(report(goodput=424242)).replace("424242", literal)
    with pytest.raises(psycopg2.Error):
        agent(7).publish(text=text)
    assert store.reports() == {}


def test_even_the_owner_cannot_store_what_is_not_finite(store, agent, postgres, cluster):
    agent(7).publish()
    for value in ("NaN", "Infinity", "-1"):
        with pytest.raises(psycopg2.errors.CheckViolation):
            postgres.execute(
                f"UPDATE pollux.report_history SET goodput = '{value}' WHERE cluster = '{cluster}'"
            )


COLUMNS_OF_PUBLISH = ("id", "cluster", "job_id", "attempt", "uid", "received_at", "wakes")


def test_one_statement_and_report_of_read_the_same_report(store, agent, report, postgres, cluster):
    """publish_v1 stores an ordinary report as report_of would."""
    body = report(
        **{
            "prior_gpus": 2,
            "prior_nodes": None,
            "prior_refuted": True,
            "data_wait": 0.25,
            "resize": "in-place",
        },
        **{"gpu_type": "a100", "measured_gpus": 2.5, "mode": "enforce", "resized": 3, "resize_cost": 1.5},
        **{"extra": 1, "accumulation": 1.5},
    )
    body["params"] |= {"alpha_rack": 0.5, "beta_rack": 0.25}
    with contextlib.closing(psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))) as admin:
        for variant in (body, {**body, "params": None, "noise": None, "times": None, "target": None}):
            with admin.cursor() as cursor:
                cursor.execute("SELECT to_jsonb(r) FROM pollux.report_of(%s) r", (json.dumps(variant),))
                (expected,) = cursor.fetchone()
                cursor.execute("ALTER FUNCTION pollux.report_of(jsonb) RENAME TO hidden_report_of")
                admin.commit()
            try:
                agent(7).publish(variant)
            finally:
                with admin.cursor() as cursor:
                    cursor.execute("ALTER FUNCTION pollux.hidden_report_of(jsonb) RENAME TO report_of")
                    admin.commit()
            with admin.cursor() as cursor:
                cursor.execute("SELECT to_jsonb(r) FROM pollux.report r WHERE cluster = %s", (cluster,))
                (stored,) = cursor.fetchone()
            for name in COLUMNS_OF_PUBLISH:
                del stored[name], expected[name]
            assert stored == expected


@pytest.mark.parametrize(
    "change",
    [
        {"goodput": "1"},
        {"checkpointed": 1},
        {"prior_refuted": "true"},
        {"limits": {"initial": "32", "maximum": 64, "local_min": 1, "local_max": 8}},
        {"limits": {"initial": 1.6, "maximum": 1.7, "local_min": 1, "local_max": 8}},
        {"times": {"launched_at": "1"}},
        {"goodput": 0, "alpha_grad": 1, "params": {}},
        {"noise": {"sqr": 1}},
        {"mode": "rule"},
        {"gpu_type": "\x1b"},
        {"resized": -1},
        {"data_wait": 1.5},
    ],
)
def test_what_postgres_would_convert_is_still_refused(store, agent, report, change):
    assert refusal(agent(7).publish, report(**change))[0] == "PX422"


def test_a_report_wakes_polluxd_when_its_news_change(store, agent, report, postgres, cluster):
    job = agent(7)
    for _ in range(2):
        job.publish(report(times={"first_step_at": None}))
    for _ in range(2):
        job.publish(report(times={"first_step_at": 100.0}, resized=None))
    job.publish(report(times={"first_step_at": 100}, resized=4))
    for _ in range(2):
        job.publish(report(times={"first_step_at": 100}, resized=4, resize_refused={"id": 5, "why": "no"}))
    admin = psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))
    with contextlib.closing(admin), admin.cursor() as cursor:
        cursor.execute("SELECT wakes FROM pollux.report_history WHERE cluster = %s ORDER BY id", (cluster,))
        assert [wakes for (wakes,) in cursor] == [False, False, True, False, True, True, False]


def test_an_agent_can_read_and_write_no_table(store, agent, postgres):
    hands = agent(7)
    tables = [
        *("job", "report_history", "acknowledgement", "cycle", "allocation", "move", "leader", "setting"),
        *("setting_audit", "schema_migration", "secret", "prior", "fingerprint", "agent_role"),
    ]
    for table in tables:
        for statement in (
            f"SELECT count(*) FROM pollux.{table}",
            f"DELETE FROM pollux.{table}",
            f"COPY pollux.{table} TO STDOUT",
        ):
            with pytest.raises(psycopg2.errors.InsufficientPrivilege):
                hands.sql(statement)
    for statement in (
        "SELECT pollux.fence('c', 1)",
        "SELECT pollux.authorise('c', 1, 0, 1, '')",
        "SELECT pollux.hmac_sha256('a', 'b')",
        "SELECT pollux_crypto.hmac('a', 'b', 'sha256')",
        "SELECT pollux_roles.admit('pollux_c_1000_abcd', 'x', 100)",
        "SELECT pollux.admit_users('c')",
        "SELECT * FROM pollux.report",
        "CREATE TABLE pollux.mine (x int)",
        "CREATE TABLE public.mine (x int)",
        "CREATE TEMPORARY TABLE mine (x int)",
        "CREATE SCHEMA mine",
        "SET ROLE pollux_daemon",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            hands.sql(statement)


def test_the_agents_functions_are_all_an_agent_may_execute(store, agent):
    allowed = agent(7).sql(
        "SELECT array_agg(p.proname::text ORDER BY p.proname) FROM pg_proc p"
        " JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE n.nspname LIKE 'pollux%%' AND has_schema_privilege(n.oid, 'USAGE')"
        " AND has_function_privilege(p.oid, 'EXECUTE')"
    )
    assert allowed == ["acknowledge_v1", "instructions_v1", "prior_v1", "publish_v1"]


def test_readers_read_all_but_the_secret_and_write_nothing(store, postgres):
    connection = psycopg2.connect(postgres.read_dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pollux.report")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            cursor.execute("SELECT * FROM pollux.secret")
        cursor.execute("SET default_transaction_read_only = off")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            cursor.execute("DELETE FROM pollux.job")
    connection.close()


def test_a_users_statements_are_not_shown_to_other_users(store, agent):
    one, other = agent(7), agent(8, uid=1001)
    one.publish()
    shown = other.sql("SELECT string_agg(query, ' ') FROM pg_stat_activity WHERE pid <> pg_backend_pid()")
    assert one.credentials[-1] not in (shown or "")


def test_a_refused_call_leaves_no_token_in_the_servers_log(store, agent, postgres):
    forged = agent(8, by="feedfacecafe" * 5)
    refusal(forged.publish)
    assert "feedfacecafe" not in postgres.log.read_text(errors="replace")


def test_one_user_takes_a_tenth_of_the_connections_at_most(store, agent):
    def take_many():
        for job_id in range(1, 31):  # of the 100 that the server has
            agent(job_id)

    with pytest.raises(psycopg2.OperationalError, match="too many connections for role"):
        take_many()
    agent(99, uid=1001).publish()
    store.settings()


def test_an_agent_is_told_to_leave_when_its_user_has_more_jobs_than_connections(store, agent, seen):
    few = [seen(job_id) for job_id in range(1, 4)]
    store.sync_jobs(few)
    assert "leave" not in agent(1).publish()
    store.sync_jobs(few + [seen(job_id) for job_id in range(4, 20)])
    assert agent(1).publish() == {"drain": None, "resize": None, "leave": True}


def test_names_that_shadow_ours_change_nothing(store, agent):
    """The functions pin their search_path.

    An agent's own settings have no effect inside them.
    """
    hands = agent(7)
    hands.sql("SET search_path = public, pg_temp")
    hands.publish()
    assert 7 in store.reports()


def test_a_drain_is_told_to_the_attempt_it_is_meant_for(store, agent):
    epoch = store.lead()
    before, after = agent(7), agent(7, attempt=1)
    move = store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    assert before.instructions() == {"drain": None, "resize": None}
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    assert before.instructions() == {"drain": move.id, "resize": None}
    assert before.publish() == {"drain": move.id, "resize": None}
    assert after.instructions() == {"drain": None, "resize": None}
    assert agent(8).instructions() == {"drain": None, "resize": None}


def test_an_acknowledgement_counts_once_and_may_be_repeated(store, agent):
    epoch = store.lead()
    job = agent(7)
    job.publish()
    move = store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    assert job.acknowledge(move.id) is False  # nobody has asked yet
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    assert agent(8).acknowledge(move.id) is False
    assert job.acknowledge(move.id, last_step_at=time.time(), checkpoint_s=0.25, step=12) is True
    assert store.open_moves()[0].step is Step.DRAINING  # polluxd alone changes its tables
    store.take_in()
    (open_move,) = store.open_moves()
    assert open_move.step is Step.CHECKPOINTED
    at = open_move.times[Step.CHECKPOINTED]
    assert store.reports()[7].checkpointed
    assert job.acknowledge(move.id) is True  # the first answer was lost
    store.take_in()
    assert store.open_moves()[0].times[Step.CHECKPOINTED] == at
    store.advance(move.id, Step.FAILED, time.time(), epoch=epoch)
    assert job.acknowledge(move.id) is False


def test_unsound_stamps_of_an_acknowledgement_are_refused(store, agent):
    assert refusal(agent(7).acknowledge, 1, last_step_at=-1)[0] == "PX422"


def test_a_report_after_the_others_is_the_latest(store, agent, report):
    job = agent(7)
    for size in (32, 64, 128):
        job.publish(report(batch_size=size))
    assert [p.batch_size for p in store.report_history(7)] == [32, 64, 128]
    assert store.reports()[7].batch_size == 128


def test_a_first_step_and_an_acknowledgement_end_a_wait_when_a_move_is_under_way(store, agent, report, seen):
    epoch = store.lead()
    job = agent(7)
    store.sync_jobs([seen(7)])
    store.wait_for_notify(0.01)  # listens from now on
    stepped = report(times={"first_step_at": time.time()})
    job.publish(stepped)
    assert store.wait_for_notify(0.5) is False, "no move waits for this step"
    move = store.plan_move(7, 0, "park", N1, NO_PLACEMENT, "park", epoch)
    job.publish(stepped)
    assert store.wait_for_notify(0.5) is False, "the step was told before"
    job.publish(report(times={"first_step_at": time.time()}))
    assert store.wait_for_notify(60) is True
    assert store.wait_for_notify(0.5) is False
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    job.acknowledge(move.id)
    assert store.wait_for_notify(60) is True


def test_notifications_without_news_end_no_wait(store, agent, seen):
    epoch = store.lead()
    hands = agent(7)
    store.sync_jobs([seen(7)])
    store.plan_move(7, 0, "requeue", N1, N2, "grow", epoch)
    store.wait_for_notify(0.01)
    ended = threading.Event()

    def flood():
        while not ended.is_set():
            hands.sql("NOTIFY pollux")
            ended.wait(0.02)

    flooding = threading.Thread(target=flood)
    flooding.start()
    try:
        assert [store.wait_for_notify(0.7) for _ in range(3)] == [False] * 3
    finally:
        ended.set()
        flooding.join()


def test_tokens_are_of_one_job_of_one_user(store, agent, seen, cluster, sign):
    store.sync_jobs([seen(7, uid=1000), seen(8, uid=1001)])
    agent(7).publish()
    # A ticket of another user, and a token that the secret signed for a job of somebody else.
    one = agent(8)
    assert "not a job of user" in refusal(one.publish)[1]
    assert refusal(agent(7, by=sign(cluster, 7, 0, 1001)).publish)[0] == "PX401"
    stranger = agent(8, uid=1001)
    stranger.credentials = agent(7).credentials
    assert "does not report for user" in refusal(stranger.publish)[1]
    stranger.credentials = (cluster, 8, 0, 1001, sign(cluster, 8, 0, 1001))
    stranger.publish()


def test_a_token_of_an_earlier_job_with_the_same_id_is_refused(store, agent, seen, cluster, sign):
    now = time.time()
    store.sync_jobs([seen(7, submit_time=now - 100)])
    job = agent(7)
    job.publish()
    job.credentials = (*job.credentials[:4], sign(cluster, 7, 0, 1000, made_at=now - 1000))
    code, message = refusal(job.publish)
    assert (code, "earlier job" in message) == ("PX401", True)


def test_a_job_that_polluxd_has_not_seen_may_try_again(store, agent, cluster, postgres):
    early = agent(7)
    postgres.execute(f"DELETE FROM pollux.job WHERE cluster = '{cluster}'")
    assert refusal(early.publish)[0] == "PX503"


def test_reports_in_a_tight_loop_are_refused_after_two_a_second(store, agent):
    """A report 5 s after the former does not count: a slow machine sends more."""
    job = agent(7)
    for _ in range(120):
        job.publish()

    def more() -> None:
        for _ in range(2000):
            job.publish()

    assert refusal(more)[0] == "PX429"
    assert job.instructions() == {"drain": None, "resize": None}
