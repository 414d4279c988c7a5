"""`polluxctl db` on a real server: init, upgrade, backup, restore."""

from __future__ import annotations

import os
import stat
import subprocess

import pytest
from click.testing import Result
from sqlalchemy import make_url
from typer.testing import CliRunner

from contrib.devcluster.postgres import DevPostgres
from polluxd.cli.ctl import app
from polluxd.store import Store

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def server(scratch):
    """A server of its own: `db init` changes the password of pollux_daemon."""
    with DevPostgres(scratch / "db-commands") as made:
        yield made


@pytest.fixture
def etc(tmp_path, server):
    """polluxd.toml; the passwords come from password files."""
    (tmp_path / "polluxd.toml").write_text(
        f'[slurm]\ncluster = "main"\n[database]\npassfile = "{tmp_path}/pgpass"\n'
        f'url = "postgresql://pollux_daemon@127.0.0.1:{server.port}/site"\n'
        f'[gateway]\npassfile = "{tmp_path}/gateway.pgpass"\n'
    )
    return tmp_path


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["db", *map(str, words)])


def superuser(server) -> str:
    url = make_url(server.admin_url)
    return f"host=127.0.0.1 port={server.port} user=postgres password={url.password} dbname=postgres"


def init(server, etc, name="site"):
    words = f"--url={superuser(server)}", f"--database={name}", f"--passfile={etc}/pgpass", "--user=root"
    words += f"--gateway-passfile={etc}/gateway.pgpass", "--gateway-user=root"
    done = run("init", *words)
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output


def config(etc):
    return f"--config={etc}/polluxd.toml"


def test_init_makes_all_and_may_be_repeated(server, etc):
    assert "has a new password" in init(server, etc)
    passfile = etc / "pgpass"
    assert stat.S_IMODE(passfile.stat().st_mode) == 0o600
    assert run("upgrade", config(etc)).exit_code == 0
    done = run("check", config(etc))
    assert done.exit_code == 0, done.output
    text = passfile.read_text()
    assert "up to date" in init(server, etc)
    assert passfile.read_text() == text
    assert text.strip().rpartition(":")[2] not in server.log.read_text()


def test_check_finds_a_missing_migration(server, etc):
    init(server, etc)
    run("upgrade", config(etc))
    server.execute("DELETE FROM pollux.schema_migration WHERE name LIKE '0001%'", database="site")
    done = run("check", config(etc))
    assert done.exit_code == 1
    assert "polluxctl db upgrade" in done.output
    server.execute("DROP DATABASE site", database="postgres")


def test_init_wants_a_superuser(server, etc):
    init(server, etc)
    password = (etc / "pgpass").read_text().strip().rpartition(":")[2]
    url = f"host=127.0.0.1 port={server.port} user=pollux_daemon password={password} dbname=site"
    done = run("init", f"--url={url}", f"--passfile={etc}/other", "--user=root")
    assert "superuser" in str(done.exception)
    assert not (etc / "other").exists()


def test_init_says_how_to_name_a_server_that_it_does_not_find(etc):
    done = run("init", "--url=host=127.0.0.1 port=1 dbname=postgres", f"--passfile={etc}/other")
    assert "port=5433" in str(done.exception)
    assert "next cycle" not in str(done.exception)


def test_backup_and_restore_by_the_printed_commands(server, etc):
    init(server, etc)
    assert run("upgrade", config(etc)).exit_code == 0
    store = Store(server.admin_url.replace("/pollux", "/site"), "main")
    store.set_settings({"paused": True}, "test")
    store.close()
    printed = run("backup-hints", config(etc)).output.splitlines()
    dump, restore = (
        next(line for line in printed if f" {word} " in line).replace("/your/backup", str(etc))
        for word in ("pg_dump", "pg_restore")
    )
    assert f"{etc}/gateway.pgpass" in printed[2]
    # Debian's own server has its socket where libpq looks; this one says where, and lets nobody in without a password.
    environment = {"PATH": os.environ["PATH"], "PGPASSWORD": make_url(server.admin_url).password}
    environment |= {"PGHOST": "127.0.0.1", "PGUSER": "postgres"}
    assert not {"--host", "--username"} & {word.partition("=")[0] for word in dump.split()}, dump
    assert dump.startswith("runuser -u postgres -- "), dump
    subprocess.run(dump, shell=True, env=environment, cwd=etc, check=True)
    server.execute("DROP DATABASE site", database="postgres")
    assert f"polluxctl db init --database=site --url='dbname=postgres port={server.port}'" in printed
    init(server, etc)
    done = subprocess.run(
        restore, shell=True, env=environment, cwd=etc, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "polluxctl db upgrade" in printed
    assert run("upgrade", config(etc)).exit_code == 0
    assert run("check", config(etc)).exit_code == 0
    remote = (etc / "polluxd.toml").read_text().replace("127.0.0.1", "db.example.org")
    remote = remote.replace('/site"', '/site?sslmode=verify-full"')
    (etc / "polluxd.toml").write_text(remote)
    printed = run("backup-hints", config(etc)).output
    assert f"pg_dump --host=db.example.org --port={server.port} --username=postgres" in printed
    assert f"--url='host=db.example.org user=postgres dbname=postgres port={server.port}'" in printed
    kept = "SELECT value FROM pollux.setting WHERE cluster = 'main' AND name = 'paused'"
    assert server.execute(kept, database="site") == [(True,)]
