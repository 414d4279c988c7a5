"""What a job can and cannot do through the three functions."""

from __future__ import annotations

import json
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
    assert got.at == pytest.approx(body["at"], abs=1e-3)
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
    assert refusal(agent(7).publish)[0] == "PX503"


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
            postgres.execute(f"UPDATE pollux.report SET goodput = '{value}' WHERE cluster = '{cluster}'")


def test_an_agent_can_read_and_write_no_table(store, agent, postgres):
    hands = agent(7)
    tables = [
        *("job", "report", "report_history", "cycle", "allocation", "move", "leader", "setting"),
        *("setting_audit", "schema_migration", "secret", "prior", "fingerprint"),
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


def test_an_agents_token_is_not_shown_to_other_agents(store, agent, postgres):
    """All agents share a role, and a role may read the text of its own sessions' statements."""
    one, other = agent(7), agent(8)
    one.publish()
    shown = other.sql("SELECT string_agg(query, ' ') FROM pg_stat_activity WHERE usename = 'pollux_agent'")
    assert one.credentials[-1] not in shown


def test_a_refused_call_leaves_no_token_in_the_servers_log(store, agent, postgres):
    forged = agent(8, by="feedfacecafe" * 5)
    refusal(forged.publish)
    assert "feedfacecafe" not in postgres.log.read_text(errors="replace")


def test_agents_cannot_take_every_connection(store, agent):
    for job_id in range(1, 81):  # of the 100 that the server has
        agent(job_id)
    with pytest.raises(psycopg2.OperationalError, match="too many connections for role"):
        agent(81)
    store.settings()


def test_names_that_shadow_ours_change_nothing(store, agent):
    """The functions pin their search_path: an agent's own settings do not reach into them."""
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
    (open_move,) = store.open_moves()
    assert open_move.step is Step.CHECKPOINTED
    at = open_move.times[Step.CHECKPOINTED]
    assert store.reports()[7].checkpointed
    assert job.acknowledge(move.id) is True  # the first answer was lost
    assert store.open_moves()[0].times[Step.CHECKPOINTED] == at
    store.advance(move.id, Step.FAILED, time.time(), epoch=epoch)
    assert job.acknowledge(move.id) is False


def test_unsound_stamps_of_an_acknowledgement_are_refused(store, agent):
    assert refusal(agent(7).acknowledge, 1, last_step_at=-1)[0] == "PX422"


def test_history_keeps_one_report_a_second(store, agent, report):
    job = agent(7)
    for size in (32, 64, 128):
        job.publish(report(batch_size=size))
    assert [p.batch_size for p in store.report_history(7)] == [32]
    assert store.reports()[7].batch_size == 128


def test_the_first_step_and_an_acknowledgement_wake_the_daemon(store, agent, report):
    store.wait_for_notify(0.01)  # listens from now on
    job = agent(7)
    job.publish()
    assert store.wait_for_notify(0.05) is False
    stepped = report(times={"first_step_at": time.time()})
    job.publish(stepped)
    assert store.wait_for_notify(5) is True
    job.publish(stepped)
    assert store.wait_for_notify(0.05) is False
    epoch = store.lead()
    move = store.plan_move(7, 0, "park", N1, NO_PLACEMENT, "park", epoch)
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    job.acknowledge(move.id)
    assert store.wait_for_notify(5) is True
