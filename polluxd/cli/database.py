"""`polluxctl db`: create, upgrade, check and back up the database."""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import psycopg2
import psycopg2.extensions
import typer
from psycopg2 import sql
from sqlalchemy import URL, make_url

from polluxd.config.config_file import DEFAULT_PATH, Config
from polluxd.errors import ConfigError, PolluxError, StoreRejected, StoreUnavailable
from polluxd.printable import printable
from polluxd.site.database_checks import as_daemon, ask
from polluxd.site.findings import Level
from polluxd.store import Store
from polluxd.store.connection import our_errors
from polluxd.store.migrations import GATEWAY, OWNER, ROLES, apply_migrations

from . import access
from .access import ConfigOption
from .doctor import print_finding

app = typer.Typer(help="Create, upgrade, check and back up the database.", no_args_is_help=True)

PASSFILE = DEFAULT_PATH.with_name("pgpass")
GATEWAY_PASSFILE = DEFAULT_PATH.with_name("gateway.pgpass")


@app.command()
def init(
    url: Annotated[str, typer.Option(help="libpq connection of a superuser")] = "dbname=postgres",
    database: Annotated[str, typer.Option(help="name of the database")] = "pollux",
    passfile: Annotated[Path, typer.Option(help="where polluxd's password goes")] = PASSFILE,
    user: Annotated[
        str, typer.Option("--user", help="polluxd's user, who owns the password file")
    ] = "pollux",
    gateway_passfile: Annotated[
        Path, typer.Option(help="where the gateway's password goes")
    ] = GATEWAY_PASSFILE,
    gateway_user: Annotated[
        str, typer.Option(help="the gateway's user, who owns its password file")
    ] = "pollux-gateway",
) -> None:
    """Create database, roles and schema. Safe to repeat.

    Run it as root on the machine of PostgreSQL, or name a superuser's connection.
    """
    place = "PostgreSQL"
    with our_errors(place), _superuser(url) as connection:
        for role in ROLES:
            if not ask(connection, "SELECT 1 FROM pg_roles WHERE rolname = %s", role):
                _run(connection, sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
        if not ask(connection, "SELECT 1 FROM pg_database WHERE datname = %s", database):
            names = sql.Identifier(database), sql.Identifier(OWNER)
            _run(connection, sql.SQL("CREATE DATABASE {} OWNER {}").format(*names))
        for role, file, owner in ((OWNER, passfile, user), (GATEWAY, gateway_passfile, gateway_user)):
            ((known,),) = ask(
                connection, "SELECT rolpassword IS NOT NULL FROM pg_authid WHERE rolname = %s", role
            )
            if not known or not file.exists():
                _new_password(connection, database, role, file, owner)
                typer.echo(f"{role} has a new password, in {file}")
    with our_errors(place), _superuser(url, database) as connection:
        applied = apply_migrations(connection)
    typer.echo(f"database {database}: " + (f"applied {', '.join(applied)}" if applied else "up to date"))


def _new_password(connection: Any, database: str, role: str, passfile: Path, user: str) -> None:
    """Give a role a password, and write it to the password file of its user."""
    password = secrets.token_urlsafe(24)
    try:
        account = pwd.getpwnam(user)
        passfile.parent.mkdir(parents=True, exist_ok=True)
        temporary = passfile.with_name(f".{passfile.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as file:
            os.fchown(file.fileno(), account.pw_uid, account.pw_gid)
            file.write(f"*:*:{database}:{role}:{password}\n")
    except KeyError:
        raise ConfigError(
            f"user {user} does not exist: name polluxd's with --user, the gateway's with --gateway-user"
        ) from None
    except OSError as error:
        raise PolluxError(f"{passfile}: {error.strerror}: run the command as root") from None
    # The verifier is made here: the server's log never sees the password.
    verifier = psycopg2.extensions.encrypt_password(password, role, connection, "scram-sha-256")
    _run(connection, sql.SQL("ALTER ROLE {} PASSWORD {}").format(sql.Identifier(role), sql.Literal(verifier)))
    temporary.replace(passfile)


@contextlib.contextmanager
def _superuser(url: str, database: str | None = None) -> Iterator[Any]:
    """Yield a superuser's connection; root connects through the socket as user postgres."""
    parameters = psycopg2.extensions.parse_dsn(url)
    if database is not None:
        parameters["dbname"] = database
    by_socket = os.geteuid() == 0 and not (parameters.get("user") or parameters.get("host", "").strip("/"))
    try:
        if by_socket:
            os.seteuid(pwd.getpwnam("postgres").pw_uid)
        try:
            connection = psycopg2.connect(**parameters)
        except psycopg2.OperationalError as error:
            text = str(error).strip()
            raise StoreUnavailable(
                f"PostgreSQL: {text}: name its port and machine with --url, as in --url 'dbname=postgres port=5433'"
            ) from None
        finally:
            if by_socket:
                os.seteuid(0)
    except KeyError:
        raise PolluxError("no user postgres here: run this on PostgreSQL's machine, or give --url") from None
    connection.autocommit = True
    try:
        if not ask(connection, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")[0][0]:
            raise StoreRejected("the connection is not a superuser's: give --url of one")
        yield connection
    finally:
        connection.close()


def _run(connection: Any, statement: sql.Composable) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


@app.command()
def upgrade(config: ConfigOption = None) -> None:
    """Bring the schema to this version. Running jobs go on. It is safe to repeat."""
    migrate(access.configuration(config))


def migrate(loaded: Config) -> None:
    store = Store(loaded.database.url, loaded.slurm.cluster, **loaded.database.waits)
    applied = store.migrate()
    store.close()
    typer.echo(f"applied {', '.join(applied)}" if applied else "the schema is up to date")


@app.command()
def check(config: ConfigOption = None) -> None:
    """Check the database: connection, TLS, roles, schema.

    Exit status 1: a fault.
    """
    found = list(as_daemon(access.configuration(config)))
    for finding in found:
        print_finding(finding)
    raise typer.Exit(int(any(finding.level is Level.FAULT for finding in found)))


def database_is_here(url: URL) -> bool:
    """Say whether a database's address names this machine."""
    return (url.host or "").strip("/") in ("", "localhost", "127.0.0.1", "::1")


@app.command("backup-hints")
def backup_hints(config: ConfigOption = None) -> None:
    """Print the commands that back the database up and restore it."""
    loaded = access.configuration(config)
    url = make_url(loaded.database.address)
    port = f"--port={url.port} " if url.port else ""
    here = database_is_here(url)
    # Debian lets only user postgres in as postgres, and only by the socket (pg_hba.conf, `local all postgres peer`).
    # The shell of root opens the file, since postgres may not write where root is.
    by = "runuser -u postgres --" if here else ""
    where = port if here else f"--host={url.host} {port}--username=postgres "
    name, dump = url.database, "/your/backup/pollux.dump"
    words = [] if here else [f"host={url.host}", "user=postgres"]
    words += ["dbname=postgres", *([f"port={url.port}"] if url.port else [])]
    superuser = "" if words == ["dbname=postgres"] else f" --url='{' '.join(words)}'"
    files = [config or DEFAULT_PATH, loaded.database.passfile, loaded.gateway.passfile]
    for line in (
        f"# Back up, as root{'' if here else ', with the password of a superuser'}; polluxd and jobs go on during it:",
        f"{by} pg_dump {where}--format=custom {name} >{dump}".strip(),
        f"cp --archive {' '.join(str(file) for file in files if file)} /your/backup/",
        "# Restore, with polluxd and the gateway stopped. Jobs that run ask for new tokens:",
        f"polluxctl db init --database={name}{superuser}",
        f"{by} pg_restore {where}--clean --if-exists --dbname={name} <{dump}".strip(),
        "polluxctl db upgrade",
        f"# Reports, cycles and decisions are kept for {loaded.database.history_days:g} days (database.history_days).",
    ):
        typer.echo(printable(line))
