"""Checks of the database, as each of its roles."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import psycopg2

from pollux.version import __version__
from polluxd.config import Config
from polluxd.errors import PolluxError, StoreError
from polluxd.store import Store
from polluxd.store.connection import Connector, libpq_words, translated

from .findings import Finding, fault, ok, warning
from .hooks import Site
from .slurm_checks import SKEW_S

_UNKNOWN_ROLE = re.compile(r"password authentication failed|role \".*\" does not exist")


def as_daemon(config: Config) -> Iterator[Finding]:
    """Check the database as polluxd sees it."""
    database = config.database
    connector = Connector(
        database.url,
        connect_timeout=database.connect_timeout_s,
        statement_timeout=database.statement_timeout_s,
    )
    try:
        with contextlib.closing(connector.open()) as connection:
            yield from _tls(connection, connector)
            yield from _clock(connection)
            yield from _roles(connection)
            yield from _schema(config)
            yield from _secret(connection, config)
            yield from _leader(connection, config)
            yield from agent_versions(connection)
    except psycopg2.Error as error:
        yield fault(
            "database",
            str(translated(error, connector.place)),
            "start PostgreSQL, or correct [database] url and passfile of polluxd.toml, or pg_hba.conf",
        )


def _ask(connection: Any, query: str, *words: object) -> list[tuple[Any, ...]]:
    with connection, connection.cursor() as cursor:
        cursor.execute(query, words or None)
        return list(cursor.fetchall())


def _tls(connection: Any, connector: Connector) -> Iterator[Finding]:
    words = libpq_words(connector.url)
    encrypted = _ask(connection, "SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()")[0][0]
    if (
        encrypted
        or connection.info.host in ("", "localhost", "::1")
        or connection.info.host.startswith(("/", "127."))
    ):
        yield ok("database", f"{connector.place} answers as {words.get('user', 'the default role')}")
    else:
        yield fault("tls", f"{connector.place} answers without TLS", "sslmode=verify-full in [database] url")


def _clock(connection: Any) -> Iterator[Finding]:
    before = time.time()
    theirs = float(_ask(connection, "SELECT extract(epoch FROM clock_timestamp())")[0][0])
    skew = theirs - (before + time.time()) / 2
    if abs(skew) > SKEW_S:
        yield fault(
            "clock",
            f"the database's clock is {skew:+.0f} s from this machine's",
            "run an NTP client on both machines",
        )


def _roles(connection: Any) -> Iterator[Finding]:
    wanted = {"pollux_daemon": True, "pollux_read": True, "pollux_agent": False}
    found = dict(
        _ask(
            connection,
            "SELECT rolname::text, rolcanlogin FROM pg_roles WHERE rolname = ANY(%s)",
            list(wanted),
        )
    )
    functions = _ask(
        connection, "SELECT to_regprocedure('pollux_roles.admit(text, text, integer)') IS NOT NULL"
    )[0][0]
    if found == wanted and functions:
        yield ok("roles", "the database has Pollux' roles")
        return
    wrong = [name for name in wanted if found.get(name) != wanted[name]]
    said = (
        f"roles {', '.join(wrong)} are missing or log in wrongly"
        if wrong
        else "the functions pollux_roles.* are missing"
    )
    yield fault("roles", said, "run `polluxctl db init` as a superuser of PostgreSQL")


def _schema(config: Config) -> Iterator[Finding]:
    store = Store(config.database.url, config.slurm.cluster)
    try:
        store.check_schema()
    except StoreError as error:
        yield fault("schema", str(error), "polluxd migrate")
    else:
        yield ok("schema", f"the schema is that of polluxd {__version__}")
    finally:
        store.close()


def _secret(connection: Any, config: Config) -> Iterator[Finding]:
    try:
        ours = config.database.secret()
        rows = _ask(
            connection,
            "SELECT key FROM pollux.secret WHERE cluster = %s ORDER BY id DESC LIMIT 2",
            config.slurm.cluster,
        )
    except (PolluxError, psycopg2.Error):
        return  # said by the checks of files and of the schema
    if ours is not None and ours != (bytes(rows[0][0]) if rows else b""):
        yield fault(
            "secret",
            f"the database does not have the secret of {config.database.secret_file}",
            "polluxd migrate",
        )


def _leader(connection: Any, config: Config) -> Iterator[Finding]:
    try:
        rows = _ask(
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


def agent_versions(connection: Any) -> Iterator[Finding]:
    """Compare the versions of the agents that are connected now."""
    rows = _ask(
        connection,
        "SELECT DISTINCT application_name FROM pg_stat_activity WHERE application_name LIKE 'pollux %%job%%'",
    )
    for (name,) in rows:
        known = re.fullmatch(r"pollux (\S+) job (\d+)", name)
        if known and known[1] != __version__:
            yield warning(
                "agent-version",
                f"job {known[2]} runs agent {known[1]}, polluxd is {__version__}",
                "install this version in the environment of the job; see the page on upgrades",
            )


def as_agent(site: Site) -> Iterator[Finding]:
    """Check that agents reach the database of hooks.json.

    No job runs, so no role may exist yet: the server's refusal of one shows that it would ask for the password.
    """
    try:
        settings = json.loads(site.hooks_json.read_text())
        words = psycopg2.extensions.parse_dsn(settings["dsn"])
        secret = (
            (site.secret_file if site.secret_file.exists() else settings["secret_file"]).read_text().strip()
        )
    except (OSError, ValueError, KeyError, AttributeError, psycopg2.Error):
        return  # said by the checks of files
    mark = hmac.new(secret.encode(), b"role", hashlib.sha256).hexdigest()[:4]
    role = f"pollux_{settings['cluster']}_0_{mark}"
    password = hmac.new(secret.encode(), f"password:{role}".encode(), hashlib.sha256).hexdigest()
    try:
        psycopg2.connect(**{"connect_timeout": "5", **words, "user": role, "password": password}).close()
    except psycopg2.OperationalError as error:
        said = " ".join(str(error).split())
        if _UNKNOWN_ROLE.search(said) is None:
            yield fault(
                "agents-database",
                f"agents do not reach the database: {said}",
                f'correct "dsn" in {site.hooks_json}, pg_hba.conf (scram-sha-256 for +pollux_agent) or the firewall',
            )
            return
    yield ok("agents-database", "agents reach the database of hooks.json")
