"""From nothing, from any earlier version, and again: one schema."""

from __future__ import annotations

import itertools
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sqlalchemy import make_url

from contrib.devcluster.postgres import DevPostgres
from polluxd.errors import StoreRejected
from polluxd.gateway.records import Holder
from polluxd.store import Store
from polluxd.store.gateway_statements import GatewayStore
from polluxd.store.rows import FORMER_AGENT
from polluxd.store.sqlfiles import migrations, sql_directory

pytestmark = pytest.mark.slurm

_numbers = itertools.count()


@pytest.fixture
def database(postgres):
    name = f"fresh{next(_numbers)}"
    postgres.create_database(name)
    return name


def url(postgres: DevPostgres, database: str, *, admin: bool = False) -> str:
    base = make_url(postgres.admin_url if admin else postgres.url)
    return base.set(database=database).render_as_string(hide_password=False)


def normalised(dump: str) -> str:
    """Strip comments, settings and empty lines from the output of pg_dump.

    These differ between versions of pg_dump; the owner of schema public differs between versions of Postgres.
    """
    passed_over = ("--", "SET ", "SELECT pg_catalog.", "ALTER SCHEMA public OWNER")
    return "".join(f"{line}\n" for line in dump.splitlines() if line and not line.startswith(passed_over))


def schema_of(postgres: DevPostgres, database: str, *options: str) -> str:
    """The whole schema with rights, as text."""
    base = make_url(postgres.admin_url)
    pg_dump = max(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"))
    server = int((postgres.data / "PG_VERSION").read_text())
    if server > int(pg_dump.parts[-3]):
        pytest.skip(f"{pg_dump} reads no database of Postgres {server}")
    place = ("-h", "127.0.0.1", "-p", str(postgres.port), "-U", "postgres", database)
    done = subprocess.run(
        [pg_dump, "--schema-only", *options, *place],
        env={"PGPASSWORD": base.password, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    # Newer pg_dump brackets its output with a random word.
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("\\"))


def test_an_applied_migration_is_never_edited():
    """The checksums of all migrations are the recorded ones.

    At a site that has applied a migration, only the next migration can change the schema. To change the
    schema, add a file and its line in SHA256SUMS.
    """
    recorded = (sql_directory() / "migrations" / "SHA256SUMS").read_text().splitlines()
    assert [f"{m.checksum}  {m.name}.sql" for m in migrations()] == recorded


def test_repeating_changes_nothing(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    assert store.migrate() == [m.name for m in migrations()]
    before = schema_of(postgres, database)
    assert store.migrate() == []
    assert schema_of(postgres, database) == before


def test_owner_and_superuser_make_the_same_schema(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    store.migrate()
    # The `postgres` fixture migrated this one as the superuser.
    assert schema_of(postgres, database) == schema_of(postgres, "pollux")


@pytest.fixture
def former(postgres):
    """A database of polluxd 0.1.0, with a role of a user and jobs."""
    name = f"former{next(_numbers)}"
    roles = ("pollux_agent", f"pollux_{name}_1000_abcd")
    for role in roles:
        postgres.execute(
            f"DO $$BEGIN IF to_regrole('{role}') IS NULL THEN CREATE ROLE {role}; END IF; END$$",
            database="postgres",
        )
    postgres.execute(f"CREATE DATABASE {name} OWNER pollux_daemon", database="postgres")
    dump = Path(__file__).with_name("schema_0_1_0.sql").read_text()
    postgres.execute(f"SET check_function_bodies = false; {dump}", database=name)
    postgres.execute(
        "INSERT INTO pollux.schema_migration VALUES ('0009_cheaper_reports', 'x');"
        f"INSERT INTO pollux_roles.agent VALUES ('{roles[1]}', 'x', '{{}}');"
        "INSERT INTO pollux.job (cluster, job_id, uid, spec, state, submitted_at, ended_at) VALUES"
        " ('c', 7, 1000, '{}', 'RUNNING', now(), NULL), ('c', 8, 1000, '{}', 'PENDING', now(), NULL),"
        " ('c', 9, 1000, '{}', 'COMPLETED', now(), now())",
        database=name,
    )
    return name


def pollux_schema(postgres, database):
    """The lines of schema `pollux`; the order of GRANTs tells nothing."""
    lines = normalised(schema_of(postgres, database, "--schema=pollux")).splitlines()
    return sorted(line for line in lines if "ON LANGUAGE plpgsql" not in line)


def test_an_upgrade_from_0_1_0_ends_in_the_schema_of_a_new_database(new_store, postgres, former):
    store = new_store(url(postgres, former, admin=True), "c")
    assert store.migrate() == [m.name for m in migrations()]
    assert store.migrate() == []
    store.check_schema()
    assert pollux_schema(postgres, former) == pollux_schema(postgres, "pollux")
    whole = schema_of(postgres, former)
    for gone in ("pollux_roles", "pollux_crypto", "pgcrypto", "pollux_agent"):
        assert gone not in whole


def test_an_upgrade_takes_users_their_logins(new_store, postgres, former):
    new_store(url(postgres, former, admin=True), "c").migrate()
    names = f"('pollux_{former}_1000_abcd', 'pollux_daemon')"
    assert postgres.execute(f"SELECT rolname FROM pg_roles WHERE rolname IN {names}") == [("pollux_daemon",)]


def test_jobs_of_former_agents_stay_as_they_are_until_a_token_is_given_out(new_store, postgres, former):
    store = new_store(url(postgres, former, admin=True), "c")
    store.migrate()
    assert store.records(restarts_since=0.0).pins == {7: FORMER_AGENT}
    records = GatewayStore(make_url(postgres.gateway_url).set(database=former), "c")
    records.issue(Holder(1000, 7, 0), b"x" * 32)
    assert store.records(restarts_since=0.0).pins == {}


def test_an_upgrade_wants_a_superuser_once(new_store, postgres, former):
    """The owner cannot take users their roles: it migrates all the same."""
    store = new_store(url(postgres, former), "c")
    assert store.migrate() == [m.name for m in migrations()]


def test_a_schema_that_is_older_than_0_1_0_is_refused(new_store, postgres, former):
    postgres.execute("UPDATE pollux.schema_migration SET name = '0008_allocation_changes'", database=former)
    store = new_store(url(postgres, former), "c")
    with pytest.raises(StoreRejected, match=r"migrate with polluxd 0\.1\.0 first"):
        store.migrate()


def test_two_at_once_take_turns(new_store, postgres, database):
    stores = [new_store(url(postgres, database), "c") for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(Store.migrate, stores))
    assert sorted(map(len, done)) == [0, 0, len(migrations())]


def test_a_migration_that_fails_leaves_no_trace(new_store, postgres, database, monkeypatch):
    from polluxd.store import migrations as module
    from polluxd.store.sqlfiles import SqlFile

    store = new_store(url(postgres, database), "c")
    store.migrate()
    bad = SqlFile("9999_bad", "CREATE TABLE pollux.unfinished (x int); SELECT 1/0")
    monkeypatch.setattr(module, "all_migrations", lambda: [*migrations(), bad])
    with pytest.raises(StoreRejected, match="division by zero"):
        store.migrate()
    monkeypatch.undo()
    assert "unfinished" not in schema_of(postgres, database)
    assert store.migrate() == []


def test_a_migration_edited_after_it_was_applied_is_refused(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    store.migrate()
    postgres.execute("UPDATE pollux.schema_migration SET checksum = 'other'", database=database)
    with pytest.raises(StoreRejected, match=migrations()[0].name):
        store.migrate()


def test_a_database_without_the_schema_says_what_to_run(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    for ask in (store.reports, store.check_schema):
        with pytest.raises(StoreRejected, match="polluxd migrate"):
            ask()
    store.migrate()
    store.check_schema()
    postgres.execute("DELETE FROM pollux.schema_migration", database=database)
    with pytest.raises(StoreRejected, match=f"lacks the migrations {migrations()[0].name}"):
        store.check_schema()


def test_missing_roles_are_named(new_store, postgres):
    postgres.execute("CREATE ROLE lonely LOGIN PASSWORD 'x'", database="postgres")
    postgres.execute("GRANT CONNECT ON DATABASE postgres TO lonely", database="postgres")
    base = make_url(postgres.url).set(username="lonely", password="x", database="postgres")
    postgres.execute("ALTER ROLE pollux_read RENAME TO pollux_read_away", database="postgres")
    try:
        store = new_store(base, "c")
        with pytest.raises(StoreRejected, match="pollux_read"):
            store.migrate()
    finally:
        postgres.execute("ALTER ROLE pollux_read_away RENAME TO pollux_read", database="postgres")
