"""The gateway's role in the database, in hostile hands, does little harm."""

from __future__ import annotations

import time

import psycopg2
import psycopg2.errors
import pytest

from polluxd.errors import ConfigError
from polluxd.store import Store
from tests.integration.store.conftest import RefusedByStore

pytestmark = pytest.mark.slurm


@pytest.fixture
def hands(store, postgres):
    """A session of role pollux_gateway."""
    connection = psycopg2.connect(postgres.gateway_url.replace("+psycopg2", ""))
    connection.autocommit = True
    yield connection.cursor()
    connection.close()


TABLES = (
    *("job", "report_history", "acknowledgement", "fingerprint", "prior", "cycle", "allocation", "move"),
    *("leader", "setting", "setting_audit", "schema_migration", "token", "reported", "forecast"),
)
NAMELESS = ("allocation", "schema_migration")
"""Tables without a cluster's name."""
READ = set(TABLES) - {"setting_audit"}
INSERTED = {"report_history", "acknowledgement", "fingerprint", "token"}


def rights(cursor, role):
    cursor.execute(
        "SELECT table_name::text, array_agg(privilege_type::text) FROM information_schema.role_table_grants"
        " WHERE grantee = %s AND table_schema = 'pollux' GROUP BY 1",
        (role,),
    )
    return {table: set(found) for table, found in cursor.fetchall()}


def test_the_gateway_has_the_rights_of_its_statements_and_no_other(hands):
    expected = {table: {"SELECT"} | ({"INSERT"} if table in INSERTED else set()) for table in READ}
    expected["report"] = {"SELECT"}
    assert rights(hands, "pollux_gateway") == expected


def test_the_gateway_changes_no_move_no_job_and_no_setting(hands):
    for statement in (
        *(f"UPDATE pollux.{table} SET cluster = 'x'" for table in TABLES if table not in NAMELESS),
        *(f"TRUNCATE pollux.{table}" for table in TABLES),
        *(f"DELETE FROM pollux.{table}" for table in TABLES if table != "token"),
        "INSERT INTO pollux.leader VALUES ('c', 9, 'me', now(), now() + interval '1 day')",
        "SELECT pollux.fence('c', 1)",
        "CREATE TABLE pollux.mine (x int)",
        "CREATE TABLE public.mine (x int)",
        "CREATE TEMPORARY TABLE mine (x int)",
        "CREATE SCHEMA mine",
        "SET ROLE pollux_daemon",
        "SET temp_file_limit = -1",
        "COPY pollux.job TO PROGRAM 'true'",
    ):
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            hands.execute(statement)


def test_readers_read_all_but_the_tokens_and_write_nothing(store, postgres):
    connection = psycopg2.connect(postgres.read_dsn)
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT count(*) FROM pollux.report")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            cursor.execute("SELECT * FROM pollux.token")
        cursor.execute("SET default_transaction_read_only = off")
        with pytest.raises(psycopg2.errors.InsufficientPrivilege):
            cursor.execute("DELETE FROM pollux.job")
    connection.close()


def test_every_function_pins_its_search_path(postgres):
    found = postgres.execute(
        "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace::regnamespace::text = 'pollux'"
        " AND NOT EXISTS (SELECT FROM unnest(p.proconfig) c WHERE c LIKE 'search_path=pg_catalog%')"
    )
    assert found == []


def test_even_the_owner_cannot_store_what_is_not_finite(store, agent, postgres, cluster):
    agent(7).publish()
    for value in ("NaN", "Infinity"):
        with pytest.raises(psycopg2.errors.InvalidTextRepresentation):
            postgres.execute(
                f"""UPDATE pollux.report_history SET report = '{{"goodput": {value}}}' WHERE cluster = '{cluster}'"""
            )


def test_inbox_rows_of_one_job_are_bounded(store, agent):
    mallory = agent(66, uid=6666)
    for number in range(20):
        mallory.prior(f"{number:016x}")
    with pytest.raises(RefusedByStore, match="too-often"):
        mallory.prior("f" * 16)


def test_reports_in_a_tight_loop_are_refused_after_two_a_second(store, agent):
    """A report 5 s after the former does not count: a slow machine sends more."""
    job = agent(7)
    for _ in range(120):
        job.publish()

    def more() -> None:
        for _ in range(2000):
            job.publish()

    with pytest.raises(RefusedByStore, match="too-often"):
        more()


def test_old_reports_are_thinned(store, agent, postgres, cluster):
    mallory = agent(66, uid=6666)
    for _ in range(5):
        mallory.publish()
    postgres.execute(
        f"UPDATE pollux.report_history SET received_at = date_trunc('minute', now()) - interval '25 h'"
        f" WHERE cluster = '{cluster}'"
    )
    store.prune(time.time(), history_s=1e6, snapshots_s=1e6, jobs_s=1e6)
    assert len(store.report_history()) == 1


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://pollux_daemon@db.example.org/pollux",
        "postgresql://pollux_daemon@db.example.org/pollux?sslmode=require",
        "postgresql://pollux_daemon@/pollux?host=/run/postgresql,db.example.org&sslmode=verify-ca",
    ],
)
def test_a_server_that_cannot_prove_who_it_is_gets_no_password(url):
    with pytest.raises(ConfigError, match="verify-full"):
        Store(url, "c")
    Store("postgresql://pollux_daemon@db.example.org/pollux?sslmode=verify-full", "c")
    Store("postgresql://pollux_daemon@/pollux?host=/run/postgresql", "c")
