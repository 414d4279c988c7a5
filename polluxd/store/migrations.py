"""Bring a database to this version's schema."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from polluxd.errors import StoreRejected

from .sqlfiles import SqlFile, roles, schema
from .sqlfiles import migrations as all_migrations

log = logging.getLogger(__name__)

OWNER = "pollux_daemon"
GATEWAY = "pollux_gateway"
ROLES = [OWNER, GATEWAY, "pollux_read"]
_OLDEST = "0009_cheaper_reports"
"""The last migration of polluxd 0.1.0, from which this version migrates."""
_LOCK = 7_072_655_571  # an arbitrary number: two `migrate` at once take turns


def apply_migrations(connection: Any) -> list[str]:
    """Apply the missing migrations and return their names.

    A new database gets the schema as a whole, and the names of all migrations. Each migration has its own transaction.
    With a superuser's connection, the roles are created first; the migrations then run as the owner. Idempotent.

    Args:
        connection: an open psycopg2 connection.

    Raises:
        StoreRejected: roles are missing, an applied migration was edited since, or the schema is older than 0.1.0's.
        psycopg2.Error: the database refused or does not answer.
    """
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SET statement_timeout = '10min'; SET client_min_messages = warning")
        cursor.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        try:
            _become_owner(cursor)
            cursor.execute("""
                CREATE SCHEMA IF NOT EXISTS pollux;
                CREATE TABLE IF NOT EXISTS pollux.schema_migration (
                    name text PRIMARY KEY,
                    checksum text NOT NULL,
                    applied_at timestamptz NOT NULL DEFAULT now())
            """)
            cursor.execute("SELECT name, checksum FROM pollux.schema_migration")
            applied = dict(cursor.fetchall())
            if not applied:
                _run(cursor, schema(), all_migrations())
                return [migration.name for migration in all_migrations()]
            if _OLDEST not in applied and not {m.name for m in all_migrations()} & applied.keys():
                raise StoreRejected(
                    f"the schema ends before {_OLDEST}: migrate with polluxd 0.1.0 first, then with this version"
                )
            fresh = []
            for migration in all_migrations():
                if migration.name in applied:
                    _must_match(migration, applied[migration.name])
                else:
                    log.info("applying migration %s", migration.name)
                    _run(cursor, migration.text, [migration])
                    fresh.append(migration.name)
            return fresh
        finally:
            if not connection.closed:
                cursor.execute("RESET ROLE; SELECT pg_advisory_unlock(%s)", (_LOCK,))


def _run(cursor: Any, text: str, recorded: Sequence[SqlFile]) -> None:
    # One string of several statements is one transaction for Postgres, `INSERT` included.
    records = [
        cursor.mogrify(
            "INSERT INTO pollux.schema_migration (name, checksum) VALUES (%s, %s)",
            (migration.name, migration.checksum),
        )
        for migration in recorded
    ]
    cursor.execute(b";\n".join([text.encode(), *records]))


def _must_match(migration: SqlFile, checksum: str) -> None:
    if migration.checksum != checksum:
        raise StoreRejected(
            f"migration {migration.name} differs from the file that was applied to this database: "
            "schema and program come from different builds; install the version that made the schema, or a later one"
        )


def _become_owner(cursor: Any) -> None:
    cursor.execute("SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
    if cursor.fetchone()[0]:
        cursor.execute(roles())
    cursor.execute(
        "SELECT array_agg(name) FROM unnest(%s) AS name"
        " WHERE NOT EXISTS (SELECT FROM pg_roles WHERE rolname = name)",
        (ROLES,),
    )
    if missing := cursor.fetchone()[0]:
        raise StoreRejected(
            f"the database roles {', '.join(missing)} do not exist, and only a superuser may make them: "
            "run `polluxd migrate` once as a superuser, or sql/roles.sql by hand"
        )
    cursor.execute(f"SET ROLE {OWNER}")
