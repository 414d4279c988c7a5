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
from polluxd.store import Store
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


def test_a_released_migration_is_never_edited():
    """At a site that has applied a migration, only the next one can change the schema: add a file."""
    folder = sql_directory()

    def git(*words):
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=False).stdout

    release = git("describe", "--tags", "--abbrev=0").strip()
    if not release:
        pytest.skip("no release has a tag here")
    for name in git("ls-tree", "--name-only", release, "migrations/").split():
        assert (folder / name).read_text() == git("show", f"{release}:./{name}")


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


def test_the_next_migration_reaches_an_old_database_and_a_new_one(new_store, postgres, database, monkeypatch):
    from polluxd.store import migrations as module
    from polluxd.store.sqlfiles import SqlFile

    old = new_store(url(postgres, database), "c")
    old.migrate()
    more = SqlFile("0002_more", "ALTER TABLE pollux.job ADD COLUMN more text NOT NULL DEFAULT ''")
    monkeypatch.setattr(module, "all_migrations", lambda: [*migrations(), more])
    assert old.migrate() == ["0002_more"]
    postgres.create_database(f"{database}_new")
    assert new_store(url(postgres, f"{database}_new"), "c").migrate() == ["0001_schema", "0002_more"]
    assert schema_of(postgres, f"{database}_new") == schema_of(postgres, database)


def test_a_migration_edited_after_it_was_applied_is_refused(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    store.migrate()
    postgres.execute("UPDATE pollux.schema_migration SET checksum = 'other'", database=database)
    with pytest.raises(StoreRejected, match=migrations()[0].name):
        store.migrate()


def test_a_database_without_the_schema_says_what_to_run(new_store, postgres, database):
    store = new_store(url(postgres, database), "c")
    for ask in (store.reports, store.check_schema):
        with pytest.raises(StoreRejected, match="polluxctl db upgrade"):
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
