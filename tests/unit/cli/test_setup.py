"""`polluxctl setup` on a folder of its own, with a systemctl that writes down its calls."""

from __future__ import annotations

import os
import time

import pytest
from typer.testing import CliRunner

from polluxd.cli import database
from polluxd.cli.ctl import app
from polluxd.errors import StoreUnavailable
from polluxd.site import hooks

CONFIG = """
[slurm]
cluster = "main"
[database]
url = "postgresql://pollux_daemon@{host}/pollux?sslmode=verify-full"
"""
SYSTEMCTL = """#!/bin/sh
echo "$*" >>{folder}/calls
case "$*" in
*ActiveState*slurmd) echo active ;;
*ActiveState*) echo inactive ;;
*ActiveEnter*) echo {since} ;;
*LoadState*) echo {unit} ;;
esac
"""


class Machine:
    """A machine whose slurmd runs since `age_s` seconds."""

    def __init__(self, folder, monkeypatch):
        self.folder = folder
        (folder / "slurm.conf").write_text("ClusterName=main\n")
        (folder / "pollux").mkdir()
        self.databases = []
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setattr(database, "init", lambda **given: self.databases.append(given))
        for program in ("slurmctld", "slurmd"):
            (folder / program).write_text("#!/bin/sh\nexit 1\n")
            (folder / program).chmod(0o755)

    def configure(self, host):
        (self.folder / "pollux" / "polluxd.toml").write_text(CONFIG.format(host=host))

    def run(self, *words, age_s=60.0, unit="loaded", given=""):
        program = self.folder / "systemctl"
        since = int((time.monotonic() - age_s) * 1e6)
        program.write_text(SYSTEMCTL.format(folder=self.folder, since=since, unit=unit))
        program.chmod(0o755)
        options = [f"--slurm-conf={self.folder}/slurm.conf", f"--folder={self.folder}/pollux"]
        return CliRunner().invoke(app, ["setup", *options, *words], input=given)

    @property
    def restarted(self):
        calls = self.folder / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.removeprefix("restart ") for line in lines if line.startswith("restart")]


@pytest.fixture
def machine(tmp_path, monkeypatch):
    if os.geteuid() != 0:
        pytest.skip("the files belong to root")
    return Machine(tmp_path, monkeypatch)


def test_a_controller_gets_database_hooks_and_services(machine):
    machine.configure("127.0.0.1")
    done = machine.run("--yes")
    assert [given["database"] for given in machine.databases] == ["pollux"]
    assert "JobSubmitPlugins=lua" in (machine.folder / "slurm.conf").read_text()
    assert machine.restarted == ["slurmd", "polluxd polluxd-gateway"], "slurmctld does not run here"
    assert "faults" in done.output, "the doctor's last line"
    assert done.exit_code == 1, "this machine has no Slurm that answers"


def test_nothing_is_written_before_the_answer(machine):
    machine.configure("127.0.0.1")
    before = {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()}
    done = machine.run(given="n\n")
    for said in ("database pollux", "JobSubmitPlugins=lua", "polluxd and polluxd-gateway are enabled"):
        assert said in done.output
    assert done.output.endswith("apply? [y/N]: n\n"), done.output
    assert str(done.exception) == "nothing was changed"
    assert (machine.databases, machine.restarted) == ([], [])
    ours = {"systemctl", "calls"}
    after = {path: path.read_bytes() for path in machine.folder.rglob("*") if path.is_file()}
    assert {p: b for p, b in after.items() if p.name not in ours} == before
    assert machine.run(given="y\ny\n").exit_code == 1, "the doctor's"
    assert (len(machine.databases), machine.restarted) == (1, ["slurmd", "polluxd polluxd-gateway"])


def test_slurm_goes_on_when_its_configuration_is_older_than_its_start(machine):
    machine.configure("127.0.0.1")
    machine.run("--yes")
    (machine.folder / "calls").unlink()
    os.utime(machine.folder / "slurm.conf", (1e9, 1e9))
    machine.run("--yes")
    assert machine.restarted == ["polluxd polluxd-gateway"]


def test_a_node_has_no_database_and_no_services(machine, monkeypatch):
    machine.run("--yes", unit="not-found")
    assert machine.databases == []
    assert machine.restarted == ["slurmd"]
    monkeypatch.setattr(hooks, "roles_here", lambda: (hooks.Role.NODE,))
    (machine.folder / "slurm.conf").unlink()  # slurmd has its configuration from slurmctld
    assert isinstance(machine.run("--yes", unit="not-found").exception, SystemExit), "no traceback"
    assert machine.restarted == ["slurmd"]


def test_a_database_elsewhere_is_made_there_first(machine, monkeypatch):
    machine.configure("db.example.org")

    def refused(_):
        raise StoreUnavailable("no such role")

    monkeypatch.setattr(database, "migrate", refused)
    done = machine.run("--yes")
    assert "name the connection of a superuser of db.example.org with --url" in str(done.exception)
    assert machine.restarted == []
    assert machine.run("--yes", "--url=host=db.example.org", "--user=daemon").exit_code == 1
    assert machine.databases[0]["url"] == "host=db.example.org"
    assert machine.databases[0]["user"] == "daemon"


def test_doctor_names_a_configuration_that_is_given_and_missing(tmp_path):
    shown = CliRunner().invoke(app, ["doctor", "--role", "login", "--config", str(tmp_path / "no.toml")])
    assert (shown.exit_code, "no.toml: no such file" in shown.output) == (1, True)
