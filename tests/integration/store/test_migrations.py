"""From nothing, from any earlier version, and again: one schema."""

from __future__ import annotations

import hmac
import itertools
import os
import subprocess
from pathlib import Path

import psycopg2
import pytest
from sqlalchemy import make_url

from contrib.devcluster.postgres import DevPostgres
from polluxd.errors import StoreRejected
from polluxd.store import Store
from polluxd.store.migrations import apply_migrations
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


def schema_of(postgres: DevPostgres, database: str) -> str:
    """The whole schema with rights, as text."""
    base = make_url(postgres.admin_url)
    pg_dump = max(Path("/usr/lib/postgresql").glob("*/bin/pg_dump"))
    server = int((postgres.data / "PG_VERSION").read_text())
    if server > int(pg_dump.parts[-3]):
        pytest.skip(f"{pg_dump} reads no database of Postgres {server}")
    done = subprocess.run(
        [pg_dump, "--schema-only", "-h", "127.0.0.1", "-p", str(postgres.port), "-U", "postgres", database],
        env={"PGPASSWORD": base.password, "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    # Newer pg_dump brackets its output with a random word.
    return "\n".join(line for line in done.stdout.splitlines() if not line.startswith("\\"))


def test_the_schema_is_the_committed_one(postgres, database):
    """The migrations produce the committed `schema.sql`.

    `schema.sql` shows a reviewer the effect of a change of the SQL files. `make schema` writes it.
    """
    Store(url(postgres, database), "c").migrate()
    reference = Path(__file__).with_name("schema.sql")
    migrated = normalised(schema_of(postgres, database))
    if os.environ.get("POLLUX_WRITE_SCHEMA"):
        reference.write_text(migrated)
    assert migrated == reference.read_text()


def test_an_applied_migration_is_never_edited():
    """The checksums of all migrations are the recorded ones.

    At a site that has applied a migration, only the next migration can change the schema. To change the
    schema, add a file and its line in SHA256SUMS.
    """
    recorded = (sql_directory() / "migrations" / "SHA256SUMS").read_text().splitlines()
    assert [f"{m.checksum}  {m.name}.sql" for m in migrations()] == recorded


def test_repeating_changes_nothing(postgres, database):
    store = Store(url(postgres, database), "c")
    assert store.migrate() == [m.name for m in migrations()]
    before = schema_of(postgres, database)
    assert store.migrate() == []
    assert schema_of(postgres, database) == before
    store.close()


def test_owner_and_superuser_make_the_same_schema(postgres, database):
    store = Store(url(postgres, database), "c")
    store.migrate()
    store.close()
    # The `postgres` fixture migrated this one as the superuser.
    assert schema_of(postgres, database) == schema_of(postgres, "pollux")


@pytest.mark.parametrize("stop", [m.name for m in migrations()][:-1])
def test_an_upgrade_from_any_version_ends_in_the_same_schema(postgres, database, stop):
    connection = psycopg2.connect(url(postgres, database).replace("+psycopg2", ""))
    names = [m.name for m in migrations()]
    assert apply_migrations(connection, upto=stop) == names[: names.index(stop) + 1]
    assert apply_migrations(connection) == names[names.index(stop) + 1 :]
    connection.close()
    assert schema_of(postgres, database) == schema_of(postgres, "pollux")


def test_two_at_once_take_turns(postgres, database):
    import threading

    stores = [Store(url(postgres, database), "c") for _ in range(3)]
    done: list[list[str]] = []
    threads = [threading.Thread(target=lambda s=s: done.append(s.migrate())) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(len, done)) == [0, 0, len(migrations())]
    for store in stores:
        store.close()


def test_a_migration_that_fails_leaves_no_trace(postgres, database, monkeypatch):
    from polluxd.store import migrations as module
    from polluxd.store.sqlfiles import SqlFile

    good, bad = migrations()[0], SqlFile("0002_bad", "CREATE TABLE pollux.half (x int); SELECT 1/0")
    monkeypatch.setattr(module, "all_migrations", lambda: [good, bad])
    store = Store(url(postgres, database), "c")
    with pytest.raises(StoreRejected, match="division by zero"):
        store.migrate()
    monkeypatch.undo()
    assert "half" not in schema_of(postgres, database)
    assert store.migrate() == [m.name for m in migrations()[1:]]
    store.close()


def test_a_migration_edited_after_it_was_applied_is_refused(postgres, database):
    store = Store(url(postgres, database), "c")
    store.migrate()
    postgres.execute(
        "UPDATE pollux.schema_migration SET checksum = 'other' WHERE name LIKE '0001%'", database=database
    )
    with pytest.raises(StoreRejected, match="0001_initial"):
        store.migrate()
    store.close()


def test_a_database_without_the_schema_says_what_to_run(postgres, database):
    store = Store(url(postgres, database), "c")
    for ask in (store.reports, store.check_schema):
        with pytest.raises(StoreRejected, match="polluxd migrate"):
            ask()
    connection = psycopg2.connect(url(postgres, database).replace("+psycopg2", ""))
    apply_migrations(connection, upto=migrations()[0].name)
    connection.close()
    with pytest.raises(StoreRejected, match=f"lacks the migrations {migrations()[1].name}"):
        store.check_schema()
    store.migrate()
    store.check_schema()
    store.close()


def test_missing_roles_are_named(tmp_path_factory, postgres):
    postgres.execute("CREATE ROLE lonely LOGIN PASSWORD 'x'", database="postgres")
    postgres.execute("GRANT CONNECT ON DATABASE postgres TO lonely", database="postgres")
    base = make_url(postgres.url).set(username="lonely", password="x", database="postgres")
    postgres.execute("ALTER ROLE pollux_read RENAME TO pollux_read_away", database="postgres")
    try:
        store = Store(base, "c")
        with pytest.raises(StoreRejected, match="pollux_read"):
            store.migrate()
        store.close()
    finally:
        postgres.execute("ALTER ROLE pollux_read_away RENAME TO pollux_read", database="postgres")


def test_a_database_that_no_superuser_has_prepared_is_told(postgres):
    postgres.execute("CREATE DATABASE unprepared OWNER pollux_daemon", database="postgres")
    store = Store(url(postgres, "unprepared"), "c")
    with pytest.raises(StoreRejected, match=r"sql/roles\.sql"):
        store.migrate()
    store.close()


def test_pgcrypto_installed_elsewhere_is_used(postgres, database):
    postgres.execute("CREATE EXTENSION pgcrypto", database=database)
    store = Store(url(postgres, database), "c")
    store.migrate()
    store.close()
    connection = psycopg2.connect(url(postgres, database).replace("+psycopg2", ""))
    with connection.cursor() as cursor:
        cursor.execute("SELECT encode(pollux.hmac_sha256('message', 'key'), 'hex')")
        assert cursor.fetchone()[0] == hmac.new(b"key", b"message", "sha256").hexdigest()
    connection.close()
