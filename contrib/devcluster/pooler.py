"""A PgBouncer before a private Postgres, set up as in contrib/pgbouncer."""

from __future__ import annotations

import configparser
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .postgres import DevPostgres
from .processes import Daemon, free_ports, wait_until

FILES = Path(__file__).parents[1] / "pgbouncer"


@contextmanager
def pooler(postgres: DevPostgres) -> Iterator[tuple[Daemon, str]]:
    """Run PgBouncer; yield its process and the connection string of agents."""
    password = secrets.token_hex(12)
    roles = ["psql", "-q", f"--set=password={password}", f"--file={FILES / 'roles.sql'}"]
    subprocess.run([*roles, postgres.admin_url.replace("+psycopg2", "")], check=True)
    (port,) = free_ports(1)
    config = configparser.ConfigParser(interpolation=None, comment_prefixes=(";",))
    config.read(FILES / "pgbouncer.ini")
    server = config["databases"]["pollux"].replace("port=5432", f"port={postgres.port}")
    config["databases"] = {postgres.database: server}
    with tempfile.TemporaryDirectory(prefix="pollux-pooler-") as name:
        users, written = Path(name) / "userlist.txt", Path(name) / "pgbouncer.ini"
        config["pgbouncer"].update({"listen_port": str(port), "auth_file": str(users), "unix_socket_dir": ""})
        users.write_text(f'"pollux_pooler" "{password}"\n')
        with written.open("w") as file:
            config.write(file)
        for path in (Path(name), users, written):
            shutil.chown(path, "postgres", "postgres")
        program = shutil.which("pgbouncer") or "/usr/sbin/pgbouncer"
        log = Path(name) / "pgbouncer.log"
        daemon = Daemon("pgbouncer", [program, "-q", str(written)], log, env={"LC_ALL": "C"}, user="postgres")
        daemon.start()
        try:
            wait_until(lambda: _accepts(daemon, port), 30.0, "PgBouncer")
            yield daemon, f"host=127.0.0.1 port={port} dbname={postgres.database}"
        finally:
            daemon.stop()


def _accepts(daemon: Daemon, port: int) -> bool:
    daemon.must_run()
    with socket.socket() as connection:
        return connection.connect_ex(("127.0.0.1", port)) == 0
