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


USER = pwd.getpwuid(1).pw_name
"""Some system user that every machine has."""


def run(etc, *words):
    """Run a command; a later option outdoes an earlier one of the name."""
    user = [] if words[0] == "update" else [f"--user={USER}"]
    options = [f"--slurm-conf={etc}/slurm.conf", f"--folder={etc}/pollux", *user]
    return CliRunner().invoke(app, [words[0], *options, *words[1:]])


def install(etc, *words):
    done = run(etc, "install", "--yes", *words)
    assert done.exit_code == 0, done.output
    return done.output


def test_install_check_and_remove(etc):
    assert run(etc, "check", "--role=controller").exit_code == 1
    said = install(etc, "--role=controller", "--role=node")
    assert "+CliFilterPlugins=lua" in said, "the diff is shown"
    for absent in ("Prolog", "Epilog"):
        assert absent not in (etc / "slurm.conf").read_text()
    assert run(etc, "check", "--role=controller", "--role=node").exit_code == 0
    assert "nothing to change" in install(etc, "--role=controller", "--role=node")
    assert run(etc, "remove", "--yes", "--role=controller").exit_code == 0
    assert "pollux" not in (etc / "slurm.conf").read_text().lower()
    assert "pollux_config" not in (etc / "job_submit.lua").read_text()
    assert {path.name for path in (etc / "pollux").iterdir()} == {"hooks", "polluxd.toml"}, "nothing secret"


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
    assert modes == dict.fromkeys(module.LUA_FILES, 0o644)
    (etc / "pollux" / "hooks" / "companion.lua").chmod(0o600)
    said = run(etc, "check", "--role=controller").output
    assert "companion.lua: mode 0600, should be 0644" in said
    install(etc, "--role=controller")
    assert run(etc, "check", "--role=controller").exit_code == 0


def test_the_settings_are_those_of_polluxd(etc):
    install(etc, "--role=controller")
    script = (etc / "job_submit.lua").read_text()
    assert "lease_s = 200.0" in script
    assert 'heartbeat_file = "/run/polluxd/heartbeat"' in script
    assert f'trusted_users = {{ "{USER}" }}' in script
    assert 'gateway = "http://127.0.0.1:9851"' in script
    assert "gateway_ca" not in script
    with (etc / "pollux" / "polluxd.toml").open("a") as file:
        file.write('[gateway]\naddresses = ["https://a:9851", "https://b:9851"]\nca = "/etc/pollux/ca.pem"\n')
    install(etc, "--role=controller")
    script = (etc / "job_submit.lua").read_text()
    assert 'gateway = "https://a:9851,https://b:9851"' in script
    assert 'gateway_ca = "/etc/pollux/ca.pem"' in script


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
    (etc / "pollux" / "hooks" / "companion.lua").write_text("old")
    os.utime(script, (1, 1))
    assert "1 scripts" in run(etc, "update").output
    assert (script.read_text(), (etc / "slurm.conf").read_text()) == before
    assert script.stat().st_mtime > 1, "slurmctld loads the hook again"
    assert run(etc, "check", "--role=controller").exit_code == 0


def test_nothing_changes_without_a_yes(etc):
    before = sorted(etc.rglob("*"))
    done = run(etc, "install", "--role=controller")
    assert done.exit_code != 0
    assert sorted(etc.rglob("*")) == before


def test_a_node_needs_nothing_of_the_controller(etc):
    (etc / "pollux" / "polluxd.toml").unlink()
    install(etc, "--role=node")
    assert not (etc / "job_submit.lua").exists()
    assert (etc / "slurm.conf").read_text() == "ClusterName=main\n"
    assert {path.name for path in (etc / "pollux").iterdir()} == {"hooks"}


def test_a_controller_has_to_know_the_gateways(etc):
    (etc / "pollux" / "polluxd.toml").unlink()
    done = run(etc, "install", "--yes", "--role=controller")
    assert done.exit_code == 1
    assert "to do: no configuration names polluxd's gateway" in done.output


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
    done = run(etc, "check", "--role=controller", "--user=nosuch")
    assert isinstance(done.exception, ConfigError)
    assert "useradd" in str(done.exception)
