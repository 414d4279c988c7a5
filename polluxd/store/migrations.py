"""Bring a database to this version's schema."""

from __future__ import annotations

import logging
from typing import Any

from polluxd.errors import StoreRejected

from .sqlfiles import SqlFile, roles
from .sqlfiles import migrations as all_migrations

log = logging.getLogger(__name__)

OWNER = "pollux_daemon"
GATEWAY = "pollux_gateway"
ROLES = [OWNER, GATEWAY, "pollux_read"]
_LOCK = 7_072_655_571  # an arbitrary number: two `migrate` at once take turns


def apply_migrations(connection: Any) -> list[str]:
    """Apply the missing migrations and return their names.

    Each migration has its own transaction. With a superuser's connection, the roles are created first; the migrations
    then run as the owner. Idempotent.

    Args:
        connection: an open psycopg2 connection.

    Raises:
        StoreRejected: roles are missing, or an applied migration was edited since.
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
            fresh = []
            for migration in all_migrations():
                if migration.name in applied:
                    _must_match(migration, applied[migration.name])
                else:
                    log.info("applying migration %s", migration.name)
                    _run(cursor, migration)
                    fresh.append(migration.name)
            return fresh
        finally:
            if not connection.closed:
                cursor.execute("RESET ROLE; SELECT pg_advisory_unlock(%s)", (_LOCK,))


def _run(cursor: Any, migration: SqlFile) -> None:
    # One string of several statements is one transaction for Postgres, `INSERT` included.
    record = cursor.mogrify(
        "INSERT INTO pollux.schema_migration (name, checksum) VALUES (%s, %s)",
        (migration.name, migration.checksum),
    )
    cursor.execute(migration.text.encode() + b";\n" + record)


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
            "run `polluxctl db init` as root on PostgreSQL's machine, or sql/roles.sql by hand"
        )
    cursor.execute(f"SET ROLE {OWNER}")
