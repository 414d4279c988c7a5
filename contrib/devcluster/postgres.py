"""A private Postgres from `initdb`, on loopback."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from .errors import DevClusterError
from .processes import Daemon, free_ports, wait_until

_ROLES = ("pollux_daemon", "pollux_gateway", "pollux_read")


class DevPostgres:
    """A throw-away Postgres with Pollux' roles and an empty database.

    It lives in `directory`. Durability is off (`fsync=off`), because it is for tests and demos. It makes the passwords
    of the roles when it starts.
    """

    def __init__(self, directory: Path | str, *, port: int | None = None, max_connections: int = 100) -> None:
        self.max_connections = max_connections
        self.directory = Path(directory).absolute()
        self.port = port or 0
        self.database = "pollux"
        self._passwords = {role: secrets.token_hex(12) for role in ("postgres", *_ROLES)}
        self._daemon: Daemon | None = None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def log(self) -> Path:
        return self.directory / "postgres.log"

    @property
    def pid(self) -> int | None:
        return self._daemon.pid if self._daemon is not None else None

    @property
    def url(self) -> str:
        """The SQLAlchemy URL of the owner, `pollux_daemon`."""
        return self._url("pollux_daemon", self.database)

    @property
    def admin_url(self) -> str:
        """SQLAlchemy URL of the superuser."""
        return self._url("postgres", self.database)

    @property
    def gateway_url(self) -> str:
        """The SQLAlchemy URL of `pollux_gateway`."""
        return self._url("pollux_gateway", self.database)

    @property
    def gateway_passfile(self) -> Path:
        """libpq's password file of `pollux_gateway`; readable for root alone."""
        path = self.directory / "gateway.pgpass"
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(f"*:*:*:pollux_gateway:{self._passwords['pollux_gateway']}\n")
        return path

    @property
    def read_dsn(self) -> str:
        """libpq connection string of `pollux_read`."""
        return self._dsn("pollux_read", self.database)

    def start(self) -> None:
        """Start Postgres; return once it accepts connections.

        The first start also initialises the data folder.

        Raises:
            DevClusterError: not root, Postgres is missing, or it did not come up.
        """
        if self._daemon is not None and self._daemon.running:
            return
        fresh = not (self.data / "PG_VERSION").exists()
        if fresh:
            self._initdb()
        if not self.port:
            (self.port,) = free_ports(1)
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",  # a deep folder would pass the 107 characters of a socket's name
            "fsync": "off",
            "synchronous_commit": "off",
            "full_page_writes": "off",
            "shared_buffers": "32MB",
            "max_connections": str(self.max_connections),
        }
        argv = [str(_postgres_bin() / "postgres"), "-D", str(self.data)]
        argv += [word for name, value in options.items() for word in ("-c", f"{name}={value}")]
        self._daemon = Daemon("postgres", argv, self.log, env=_clean_environment(), user="postgres")
        self._daemon.start()
        wait_until(self._accepts, 90, f"Postgres on port {self.port}")
        if fresh:
            self._bootstrap()

    def stop(self, *, immediate: bool = False) -> None:
        """Shut Postgres down.

        A fast shutdown (INT) ends all sessions. `immediate` is a crash (QUIT): the next start recovers the database.
        """
        if self._daemon is not None:
            self._daemon.stop(signal.SIGQUIT if immediate else signal.SIGINT, grace_s=10)
            self._daemon = None

    def execute(self, sql: str, *, database: str | None = None) -> list[tuple[Any, ...]]:
        """Run statements as the superuser, outside a transaction; return the rows of the last one."""
        import psycopg2  # noqa: PLC0415 - keeps `install.sh` able to import this package before the venv is filled

        connection = psycopg2.connect(self._dsn("postgres", database or self.database))
        try:
            connection.autocommit = True
            with connection.cursor() as cursor:
                cursor.execute(sql)
                return cursor.fetchall() if cursor.description else []
        finally:
            connection.close()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _initdb(self) -> None:
        if os.geteuid() != 0:
            raise DevClusterError(
                "the private cluster needs root: initdb runs as user postgres, slurmd as root"
            )
        self.directory.mkdir(parents=True, exist_ok=True)
        owner = pwd.getpwnam("postgres")
        os.chown(self.directory, owner.pw_uid, owner.pw_gid)
        password_file = self.directory / "superuser.password"
        password_file.write_text(self._passwords["postgres"] + "\n")
        password_file.chmod(0o600)
        os.chown(password_file, owner.pw_uid, owner.pw_gid)
        done = subprocess.run(
            [
                *(str(_postgres_bin() / "initdb"), "-D", str(self.data), "-U", "postgres"),
                *(
                    "--auth=scram-sha-256",
                    f"--pwfile={password_file}",
                    "--encoding=UTF8",
                    "--locale=C",
                    "--no-sync",
                ),
            ],
            user="postgres",
            group="postgres",
            extra_groups=[],
            cwd="/",
            env=_clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise DevClusterError(
                f"initdb failed in {self.data} (can user postgres reach it?): {done.stderr.strip()}"
            )

    def _bootstrap(self) -> None:
        for role in _ROLES:
            self.execute(f"CREATE ROLE {role} LOGIN PASSWORD '{self._passwords[role]}'", database="postgres")
        self.create_database(self.database)

    def create_database(self, name: str) -> None:
        """Create a database as a site's superuser does.

        It belongs to `pollux_daemon` and has the roles and their rights.
        """
        self.execute(f"CREATE DATABASE {name} OWNER pollux_daemon", database="postgres")
        self.execute((Path(__file__).parents[2] / "sql" / "roles.sql").read_text(), database=name)

    def _accepts(self) -> bool:
        assert self._daemon is not None
        self._daemon.must_run()
        ready = [_pg_isready(), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        return subprocess.run(ready, check=False, env=_clean_environment()).returncode == 0

    def _url(self, role: str, database: str) -> str:
        return f"postgresql+psycopg2://{role}:{self._passwords[role]}@127.0.0.1:{self.port}/{database}"

    def _dsn(self, role: str, database: str) -> str:
        return (
            f"host=127.0.0.1 port={self.port} dbname={database} user={role} password={self._passwords[role]}"
        )


def _clean_environment() -> dict[str, str]:
    """Return the caller's environment without PG* variables.

    A PGPORT or PGDATA of the machine's own Postgres must not reach this one.
    """
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}


def _postgres_bin() -> Path:
    """Return the folder of the newest Postgres' server programs.

    Debian keeps them out of PATH. POLLUX_POSTGRES_BIN names another folder (`make test-postgres-versions`).
    """
    if chosen := os.environ.get("POLLUX_POSTGRES_BIN"):
        return Path(chosen)
    versions = [p for p in Path("/usr/lib/postgresql").glob("*/bin") if (p / "initdb").exists()]
    if versions:
        return max(versions, key=lambda p: float(p.parent.name))
    found = shutil.which("initdb")
    if found is None:
        raise DevClusterError("no initdb: install Postgres (contrib/devcluster/install.sh does)")
    return Path(found).parent


def _pg_isready() -> str:
    """Return the client's program; a server without its clients has none."""
    own = _postgres_bin() / "pg_isready"
    return str(own) if own.exists() else shutil.which("pg_isready") or "pg_isready"
