"""Checks of the database, as each of its roles."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from typing import Any

import psycopg2

from pollux.version import __version__
from polluxd.config.config_file import Config
from polluxd.errors import StoreError
from polluxd.store import Store
from polluxd.store.connection import Connector, translated
from polluxd.store.migrations import ROLES
from polluxd.store.transport import libpq_parameters

from .findings import Finding, clock, fault, ok, warning

_FULL = re.compile("too many clients|connection slots|too many connections")
"""What PostgreSQL says when max_connections, or a limit of the role, is reached."""


def as_daemon(config: Config) -> Iterator[Finding]:
    """Check the database as polluxd sees it."""
    connector = Connector(config.database.url, **config.database.waits)
    try:
        with contextlib.closing(connector.open()) as connection:
            yield from _tls(connection, connector)
            yield _clock(connection)
            yield from _roles(connection)
            yield from _schema(config)
            yield from _leader(connection, config)
    except psycopg2.Error as error:
        reason = str(translated(error, connector.place))
        yield fault("database", reason, _remedy(reason))


def _remedy(reason: str) -> str:
    if _FULL.search(reason):
        return (
            "raise max_connections in postgresql.conf, or end sessions that are not needed "
            "(SELECT usename, count(*) FROM pg_stat_activity GROUP BY 1), and restart PostgreSQL"
        )
    return "start PostgreSQL, or correct [database] url and passfile of polluxd.toml, or pg_hba.conf"


def ask(connection: Any, query: str, *parameters: object) -> list[tuple[Any, ...]]:
    """Return the rows of a query, in a transaction of its own."""
    with connection, connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return list(cursor.fetchall())


def _tls(connection: Any, connector: Connector) -> Iterator[Finding]:
    parameters = libpq_parameters(connector.url)
    encrypted = ask(connection, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")[0][0]
    if (
        encrypted
        or connection.info.host in ("", "localhost", "::1")
        or connection.info.host.startswith(("/", "127."))
    ):
        yield ok("database", f"{connector.place} answers as {parameters.get('user', 'the default role')}")
    else:
        yield fault("tls", f"{connector.place} answers without TLS", "sslmode=verify-full in [database] url")


def _clock(connection: Any) -> Finding:
    before = time.time()
    theirs = float(ask(connection, "SELECT extract(epoch FROM clock_timestamp())")[0][0])
    return clock(theirs - (before + time.time()) / 2, "the database's clock", "this machine's")


def _roles(connection: Any) -> Iterator[Finding]:
    found = ask(
        connection, "SELECT rolname::text FROM pg_roles WHERE rolcanlogin AND rolname = ANY(%s)", ROLES
    )
    wrong = sorted(set(ROLES) - {name for (name,) in found})
    if not wrong:
        yield ok("roles", "the database has Pollux' roles")
        return
    yield fault(
        "roles",
        f"roles {', '.join(wrong)} are missing or may not log in",
        "run `polluxctl db init` as a superuser of PostgreSQL",
    )


def _schema(config: Config) -> Iterator[Finding]:
    store = Store(config.database.url, config.slurm.cluster)
    try:
        store.check_schema()
    except StoreError as error:
        reason = str(error)
        yield fault("schema", reason, _remedy(reason) if _FULL.search(reason) else "polluxctl db upgrade")
    else:
        yield ok("schema", f"the schema is that of polluxd {__version__}")
    finally:
        store.close()


def _leader(connection: Any, config: Config) -> Iterator[Finding]:
    try:
        rows = ask(
            connection,
            "SELECT holder, lease_until > now() FROM pollux.leader WHERE cluster = %s",
            config.slurm.cluster,
        )
    except psycopg2.Error:
        return
    if rows and rows[0][1]:
        yield ok("leader", f"polluxd leads on {rows[0][0]}")
    else:
        yield warning(
            "leader", "no polluxd leads", "systemctl enable --now polluxd; systemctl status polluxd"
        )
