"""`polluxctl hooks` on a folder of its own."""

from __future__ import annotations

import os
import pwd
import stat

import pytest
from typer.testing import CliRunner

from polluxd.cli.hooks import app
from polluxd.errors import ConfigError
from polluxd.site import hooks as module
from polluxd.site.hooks import Role, roles_here

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="the files belong to root")

CONFIG = """
[slurm]
cluster = "main"
lease_s = 200.0
heartbeat_file = "/run/polluxd/heartbeat"
[database]
url = "postgresql://pollux_daemon@db.example.org:5433/pollux?sslmode=verify-full&sslrootcert=/etc/ca.pem"
"""


@pytest.fixture
def etc(tmp_path):
    (tmp_path / "slurm.conf").write_text("ClusterName=main\n")
    (tmp_path / "pollux").mkdir()
    (tmp_path / "pollux" / "polluxd.toml").write_text(CONFIG)
    return tmp_path


def run(etc, *words, **options):
    user = pwd.getpwuid(1).pw_name  # some system user that every machine has
    options = [f"--slurm-conf={etc}/slurm.conf", f"--folder={etc}/pollux", f"--user={user}"]
    return CliRunner().invoke(app, [*words, *options])


def install(etc, *words):
    done = run(etc, "install", "--yes", *words)
    assert done.exit_code == 0, done.output
    return done.output


def test_install_check_and_remove(etc):
    assert run(etc, "check", "--role=controller").exit_code == 1
    said = install(etc, "--role=controller", "--role=node")
    assert "+Prolog=" in said, "the diff is shown"
    secret = (etc / "pollux" / "ticket.secret").read_text().strip()
    assert secret not in said
    assert run(etc, "check", "--role=controller", "--role=node").exit_code == 0
    assert "nothing to change" in install(etc, "--role=controller", "--role=node")
    assert run(etc, "remove", "--yes", "--role=controller").exit_code == 0
    assert "pollux" not in (etc / "slurm.conf").read_text().lower()
    assert "pollux_config" not in (etc / "job_submit.lua").read_text()
    assert (etc / "pollux" / "ticket.secret").read_text().strip() == secret


def test_remove_edits_the_slurm_conf_that_the_configuration_names(etc):
    install(etc, "--role=controller")
    config = etc / "pollux" / "polluxd.toml"
    config.write_text(CONFIG.replace("[slurm]", f'[slurm]\nconf = "{etc}/slurm.conf"'))
    words = ["remove", "--yes", "--role=controller", f"--config={config}", f"--folder={etc}/pollux"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "pollux" not in (etc / "slurm.conf").read_text().lower()


def test_modes_and_owners(etc):
    install(etc, "--role=controller")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (etc / "pollux" / "hooks").iterdir()}
    assert modes == dict.fromkeys(module.SCRIPTS, 0o755) | dict.fromkeys(module.LUA_FILES, 0o644)
    secret, settings = (etc / "pollux" / name for name in ("ticket.secret", "hooks.json"))
    assert stat.S_IMODE(secret.stat().st_mode) == 0o640
    assert secret.stat().st_gid == pwd.getpwuid(1).pw_gid
    assert stat.S_IMODE(settings.stat().st_mode) == 0o600
    secret.chmod(0o644)
    (etc / "pollux" / "hooks" / "prolog").chmod(0o644)
    said = run(etc, "check", "--role=controller").output
    assert "ticket.secret: mode 0644, should be 0640" in said
    assert "prolog: mode 0644, should be 0755" in said
    install(etc, "--role=controller")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o640


def test_the_settings_are_those_of_polluxd(etc):
    install(etc, "--role=controller")
    script = (etc / "job_submit.lua").read_text()
    assert "lease_s = 200.0" in script
    assert 'heartbeat_file = "/run/polluxd/heartbeat"' in script
    assert f'trusted_users = {{ "{pwd.getpwuid(1).pw_name}" }}' in script
    dsn = "host=db.example.org port=5433 dbname=pollux sslmode=verify-full sslrootcert=/etc/ca.pem"
    assert f'"dsn": "{dsn}"' in (etc / "pollux" / "hooks.json").read_text()


def test_a_changed_file_of_the_site_is_kept_and_stays_in_force(etc):
    (etc / "job_submit.lua").write_text("function slurm_job_submit() return 0 end\nreturn slurm.SUCCESS\n")
    (etc / "job_submit.lua").chmod(0o600)
    said = install(etc, "--role=controller")
    (copy,) = etc.glob("job_submit.lua.*.pollux-old")
    assert f"kept: {copy}" in said
    assert copy.read_text().startswith("function slurm_job_submit() return 0 end")
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    lines = (etc / "job_submit.lua").read_text().splitlines()
    assert (lines[0], lines[-1]) == ("function slurm_job_submit() return 0 end", "return slurm.SUCCESS")
    assert (etc / "job_submit.lua").stat().st_mode & 0o444 == 0o444, "slurmctld's user can read it"


def test_an_update_changes_pollux_own_scripts_alone(etc):
    install(etc, "--role=controller")
    script = etc / "job_submit.lua"
    before = script.read_text(), (etc / "slurm.conf").read_text()
    (etc / "pollux" / "hooks" / "ticket").write_text("old")
    os.utime(script, (1, 1))
    done = CliRunner().invoke(app, ["update", f"--slurm-conf={etc}/slurm.conf", f"--folder={etc}/pollux"])
    assert "1 scripts" in done.output
    assert (script.read_text(), (etc / "slurm.conf").read_text()) == before
    assert script.stat().st_mtime > 1, "slurmctld loads the hook again"
    assert run(etc, "check", "--role=controller").exit_code == 0


def test_nothing_changes_without_a_yes(etc):
    before = sorted(etc.rglob("*"))
    done = run(etc, "install", "--role=controller")
    assert done.exit_code != 0
    assert sorted(etc.rglob("*")) == before


def test_a_node_wants_the_controllers_files(etc):
    (etc / "pollux" / "polluxd.toml").unlink()
    done = run(etc, "install", "--yes", "--role=node")
    assert done.exit_code == 1
    for name in ("hooks.json", "ticket.secret"):
        assert f"{name} is missing: copy it from the controller" in done.output
    assert not (etc / "job_submit.lua").exists()
    assert "Prolog" not in (etc / "slurm.conf").read_text()


def test_slurm_conf_names_no_plugin_that_is_not_installed(etc):
    plugins = etc / "plugins"
    plugins.mkdir()
    (plugins / "select_cons_tres.so").touch()
    (etc / "slurm.conf").write_text(f"PluginDir={plugins}\n")
    done = run(etc, "install", "--yes", "--role=controller")
    assert done.exit_code == 1
    assert "job_submit_lua.so" in done.output
    assert (etc / "slurm.conf").read_text() == f"PluginDir={plugins}\n"


def test_roles_by_the_programs_installed():
    assert roles_here({"slurmd": "/x", "sbatch": "/x"}.get) == (Role.NODE, Role.LOGIN)
    with pytest.raises(ConfigError, match="--role"):
        roles_here({}.get)


def test_polluxds_user_must_exist(etc):
    done = CliRunner().invoke(
        app,
        [
            "check",
            "--role=controller",
            f"--slurm-conf={etc}/slurm.conf",
            f"--folder={etc}/pollux",
            "--user=nosuch",
        ],
    )
    assert isinstance(done.exception, ConfigError)
    assert "useradd" in str(done.exception)


def test_nothing_is_left_to_do_where_the_sites_own_scripts_call_those_of_pollux(etc):
    (etc / "prolog.d").mkdir()
    conf = f"ClusterName=main\nProlog={etc}/prolog.d/*\nEpilog={etc}/epilog\nTaskProlog={etc}/gone\n"
    (etc / "slurm.conf").write_text(conf)
    (etc / "prolog.d" / "10-scratch").write_text("#!/bin/sh\nexit 0\n")
    (etc / "epilog").write_text("#!/bin/sh\nexit 0\n")
    said = run(etc, "install", "--yes", "--role=controller")
    assert (said.exit_code, said.output.count("to do:")) == (1, 3)
    (etc / "prolog.d" / "50-pollux").symlink_to(etc / "pollux" / "hooks" / "prolog")
    (etc / "epilog").write_text(f"#!/bin/sh\n{etc}/pollux/hooks/epilog\nexit 0\n")
    (etc / "gone").write_text(f"#!/bin/sh\n{etc}/pollux/hooks/task_prolog\n")
    assert "nothing to change" in install(etc, "--role=controller")
    assert run(etc, "check", "--role=controller").exit_code == 0
