"""A hostile user who attacks the database harms only that user.

Each docstring names the row of the threat table that its test covers.
"""

from __future__ import annotations

import contextlib
import time

import psycopg2
import psycopg2.errors
import pytest

from polluxd.errors import ConfigError
from polluxd.model import Placement, Step
from polluxd.store import Store
from tests.integration.store.credentials import login, token

pytestmark = pytest.mark.slurm

N1, N2 = Placement(("n1",), 4), Placement(("n2",), 4)
MALLORY, ALICE = 6666, 1000


@pytest.fixture
def mallory(store, agent):
    """A session of the hostile user's own role."""
    return agent(66, uid=MALLORY)


@pytest.fixture
def alice(store, agent):
    return agent(7, uid=ALICE)


def role_of(session):
    return session.connection.info.user


def repair(store):
    """What polluxd does within some seconds."""
    store.agent_roles.look_again()
    store.agent_roles.admit(frozenset())


@pytest.mark.parametrize(
    "damage",
    [
        "ALTER ROLE CURRENT_USER PASSWORD 'mine'",
        "ALTER ROLE CURRENT_USER SET default_transaction_read_only = on",
        "ALTER ROLE CURRENT_USER IN DATABASE pollux SET statement_timeout = 1",
        "ALTER ROLE CURRENT_USER SET search_path = public",
        "ALTER ROLE CURRENT_USER RESET ALL",
    ],
)
def test_a_user_who_breaks_his_role_harms_himself_and_it_is_repaired(store, agent, mallory, alice, damage):
    """Row 8."""
    mallory.sql(damage)
    agent(7).publish()
    repair(store)
    with pytest.raises(psycopg2.OperationalError, match="terminating connection"):
        mallory.publish()
    agent(66, uid=MALLORY).publish()
    alice.publish()  # her session was left alone


def test_no_user_ends_or_cancels_sessions_of_others(mallory, alice):
    """Row 8."""
    for call in ("pg_terminate_backend", "pg_cancel_backend"):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            mallory.sql(f"SELECT {call}(%s)", alice.connection.info.backend_pid)
    alice.publish()


def test_an_open_transaction_holds_nobody_up_and_is_ended(store, mallory, seen, postgres):
    """Row 10: an acknowledgement in an open transaction froze the cycle.

    The transaction stays open after the acknowledgement.
    """
    epoch = store.lead()
    store.sync_jobs([seen(66, uid=MALLORY)])
    move = store.plan_move(66, 0, "requeue", N1, N2, "x", epoch)
    store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)
    mallory.sql("SET idle_in_transaction_session_timeout = 0")
    mallory.sql("SET statement_timeout = 0")
    mallory.connection.autocommit = False
    assert mallory.acknowledge(move.id)
    mallory.publish()
    mallory.sql("SELECT pollux.prior_v1(%s, %s, %s, %s, %s, %s, '')", *mallory.credentials, "ab" * 16)
    store.sync_jobs([seen(66, uid=MALLORY, restart_count=1)])
    store.take_in()
    assert store.advance(move.id, Step.FAILED, time.time(), epoch=epoch)
    store.sync_jobs([])
    store.prune(time.time() + 1000, history_s=0, snapshots_s=0, jobs_s=0)
    with psycopg2.connect(postgres.url.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT role, ended FROM pollux_roles.end_sessions(0)")
        assert cursor.fetchall() == [(role_of(mallory), 1)]
    with pytest.raises(psycopg2.OperationalError):
        mallory.sql("SELECT 1")


def test_the_same_transaction_held_the_moves_row_when_agents_wrote_it(store, mallory, seen, postgres):
    """Row 10 without its defence.

    The superuser updates the move's row, as acknowledge_v1 did in an earlier version.
    """
    epoch = store.lead()
    store.sync_jobs([seen(66, uid=MALLORY)])
    move = store.plan_move(66, 0, "requeue", N1, N2, "x", epoch)
    with contextlib.closing(psycopg2.connect(postgres.admin_url.replace("+psycopg2", ""))) as before:
        with before.cursor() as cursor:
            cursor.execute("UPDATE pollux.move SET detail = 'held' WHERE id = %s", (move.id,))
        with pytest.raises(Exception, match="timeout"):
            store.advance(move.id, Step.DRAINING, time.time(), epoch=epoch)


def test_no_user_makes_objects_that_stand_before_ours(mallory):
    """Row 11: a domain public.jsonb whose CHECK stores what other agents send."""
    for statement in (
        "CREATE DOMAIN public.jsonb AS text",
        "CREATE TEMP TABLE report (x int)",
        "CREATE FUNCTION public.f() RETURNS int LANGUAGE sql AS 'SELECT 1'",
        "CREATE SCHEMA AUTHORIZATION CURRENT_USER",
        "CREATE DOMAIN pg_temp.jsonb AS text",
        "DO 'BEGIN RAISE LOG ''x''; END'",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            mallory.sql(statement)


def test_every_function_pins_its_search_path(postgres):
    """Row 11: of the schema's functions, none follows the caller's."""
    with psycopg2.connect(postgres.url.replace("+psycopg2", "")) as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace::regnamespace::text"
            " IN ('pollux', 'pollux_roles') AND NOT EXISTS"
            " (SELECT FROM unnest(p.proconfig) c WHERE c LIKE 'search_path=pg_catalog%')"
        )
        assert cursor.fetchall() == []


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT lo_from_bytea(0, 'x')",
        "SELECT lo_create(0)",
        "SELECT lo_creat(-1)",
        "SELECT pg_logical_emit_message(false, 'x', 'y')",
        "SELECT pg_advisory_lock(1)",
        "SELECT pg_try_advisory_xact_lock(1, 2)",
        "SELECT pg_export_snapshot()",
        "SET temp_file_limit = -1",
        "SET log_min_messages = debug5",
        "SET log_statement = 'all'",
    ],
)
def test_no_user_fills_disk_log_or_the_lock_table(mallory, statement):
    """Row 14."""
    with pytest.raises(psycopg2.errors.InsufficientPrivilege):
        mallory.sql(statement)


def test_a_sort_that_spills_is_ended(mallory):
    """Row 14."""
    mallory.sql("SET work_mem = '64kB'")
    with pytest.raises(psycopg2.errors.ConfigurationLimitExceeded, match="temp_file_limit"):
        mallory.sql(
            "SELECT count(*) FROM (SELECT g, repeat('x', 100) FROM generate_series(1, 100000) g ORDER BY 2, 1) s"
        )


def test_errors_in_a_loop_leave_nothing_in_the_servers_log(mallory, postgres):
    """Row 14."""
    for _ in range(20):
        with pytest.raises(psycopg2.Error):
            mallory.sql("SELECT 1 / 0 AS feedfacefeed")
    text = postgres.log.read_text(errors="replace")
    assert "feedfacefeed" not in text
    assert "division by zero" not in text


@pytest.mark.parametrize("database", ["postgres", "template1"])
def test_agents_reach_no_other_database(mallory, postgres, cluster, database):
    """Row 14: temporary tables in database postgres."""
    with pytest.raises(psycopg2.OperationalError, match="permission denied for database"):
        psycopg2.connect(login(postgres, cluster, MALLORY), dbname=database)


def test_inbox_rows_of_one_job_are_bounded(store, mallory):
    """Disk: reports, fingerprints and acknowledgements have a limit each."""
    for number in range(20):
        mallory.sql(
            "SELECT pollux.prior_v1(%s, %s, %s, %s, %s, %s, '')", *mallory.credentials, f"{number:016x}"
        )
    with pytest.raises(psycopg2.Error) as caught:
        mallory.sql("SELECT pollux.prior_v1(%s, %s, %s, %s, %s, %s, '')", *mallory.credentials, "f" * 16)
    assert caught.value.pgcode == "PX429"


def test_old_reports_are_thinned(store, mallory, postgres, cluster):
    for _ in range(5):
        mallory.publish()
    postgres.execute(
        f"UPDATE pollux.report_history SET received_at = date_trunc('minute', now()) - interval '25 h'"
        f" WHERE cluster = '{cluster}'"
    )
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    assert len(store.report_history()) == 1


def test_a_rotated_secret_leaves_running_jobs_their_role(store, agent, seen, cluster, postgres):
    """Jobs with tickets of the current and the previous secret go on.

    The database refuses jobs with tickets of an older secret, and their roles are dropped.
    """
    second, third = b"the second secret, also 32 bytes..", b"the third secret, also 32 bytes..."
    store.sync_jobs([seen(7)])
    old = agent(7)
    old.publish()
    store.install_secret(second)
    store.sync_jobs([seen(7)])
    agent(7).publish()
    fresh = psycopg2.connect(login(postgres, cluster, 1000, second))
    with fresh.cursor() as cursor:
        cursor.execute(
            "SELECT pollux.instructions_v1(%s, 7, 0, 1000, %s)", (cluster, token(cluster, 7, 0, 1000, second))
        )
    fresh.close()
    store.install_secret(third)
    store.sync_jobs([seen(7)])
    with pytest.raises(psycopg2.Error) as caught:
        old.publish()
    assert caught.value.pgcode == "PX401"
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    with pytest.raises(psycopg2.OperationalError, match="authentication failed"):
        psycopg2.connect(login(postgres, cluster, 1000))
    psycopg2.connect(login(postgres, cluster, 1000, second)).close()
    psycopg2.connect(login(postgres, cluster, 1000, third)).close()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://pollux_daemon@db.example.org/pollux",
        "postgresql://pollux_daemon@db.example.org/pollux?sslmode=require",
        "postgresql://pollux_daemon@/pollux?host=/run/postgresql,db.example.org&sslmode=verify-ca",
    ],
)
def test_a_server_that_cannot_prove_who_it_is_gets_no_password(url):
    """Row 19."""
    with pytest.raises(ConfigError, match="verify-full"):
        Store(url, "c")
    Store("postgresql://pollux_daemon@db.example.org/pollux?sslmode=verify-full", "c")
    Store("postgresql://pollux_daemon@/pollux?host=/run/postgresql", "c")
