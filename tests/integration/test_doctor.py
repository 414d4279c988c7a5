"""`polluxctl doctor` finds planted faults, each with its remedy.

The faults that need a restart of Slurm are planted with `POLLUX_DOCTOR_ALL=1` only.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from contrib.devcluster import DevCluster, write_configuration
from polluxd.cli.ctl import app
from polluxd.config.config_file import load_config
from polluxd.store import Store

pytestmark = pytest.mark.slurm

READ_AT = [0.0]
"""The time of job_submit.lua that slurmctld has read last."""
ALL = bool(os.environ.get("POLLUX_DOCTOR_ALL"))


@dataclass
class Site:
    """A whole installation on one machine."""

    cluster: DevCluster
    undo: ExitStack

    @property
    def etc(self) -> Path:
        return self.cluster.slurm_conf.parent

    @property
    def config(self) -> Path:
        return self.etc / "polluxd.toml"

    def polluxctl(self, *words: str, user: str = "root") -> Result:
        options = [f"--config={self.config}", f"--folder={self.etc}", f"--user={user}"]
        options += [
            f"--slurm-conf={self.cluster.slurm_conf}",
            "--role=controller",
            "--role=node",
            "--role=login",
        ]
        return CliRunner().invoke(app, [*words, *options])

    def doctor(self, user: str = "root") -> dict[str, list[dict[str, str]]]:
        """Return what the doctor found, by check, the sound checks left out."""
        done = self.polluxctl("doctor", "--json", user=user)
        assert done.exit_code in (0, 1), done.output
        found: dict[str, list[dict[str, str]]] = {}
        for finding in json.loads(done.stdout):
            if finding["level"] != "ok":
                found.setdefault(finding["check"], []).append(finding)
        faults = [f for each in found.values() for f in each if f["level"] == "fault"]
        assert done.exit_code == bool(faults)
        return found

    def edit(self, path: Path, old: str, new: str) -> None:
        """Change a file's text until the end of the test."""
        text, mode = path.read_text(), path.stat().st_mode
        assert old in text, f"{old} is not in {path}"
        self.undo.callback(path.chmod, mode)
        self.undo.callback(path.write_text, text)
        path.write_text(text.replace(old, new))

    def lua(self, old: str, new: str, name: str = "job_submit.lua") -> None:
        """Change a Lua script, and have slurmctld read the hooks again, now and at the end of the test."""
        self.undo.callback(self.read_again)
        self.edit(self.etc / name, old, new)
        self.read_again()

    def read_again(self) -> None:
        # slurmctld reads a script again whose time, in whole seconds, is newer than the one that it has read.
        at = READ_AT[0] = max(READ_AT[0], time.time()) + 2
        os.utime(self.etc / "job_submit.lua", (at, at))

    def beat(self, age_s: float) -> None:
        path = self.cluster.hooks.heartbeat_file
        path.write_text(f"{time.time() - age_s:.0f}\n")
        self.undo.callback(path.unlink)

    def secret(self, key: str, section: str) -> None:
        """Name a file that everybody can read, in the configuration."""
        path = self.etc / key
        path.write_text("x")
        path.chmod(0o644)
        self.edit(self.config, f"[{section}]\n", f'[{section}]\n{key} = "{path}"\n')

    def chmod(self, path: Path, mode: int) -> None:
        self.undo.callback(path.chmod, path.stat().st_mode)
        path.chmod(mode)

    def away(self, path: Path) -> None:
        copy = path.with_name(f"{path.name}.away")
        self.undo.callback(copy.rename, path)
        path.rename(copy)

    def slurm_conf(self, old: str, new: str) -> None:
        """Change slurm.conf and restart slurmctld, until the end of the test."""
        self.undo.callback(self.cluster.restart_slurmctld)
        self.edit(self.cluster.slurm_conf, old, new)
        self.cluster.restart_slurmctld()

    def sql(self, change: str, back: str) -> None:
        assert self.cluster.postgres is not None
        self.cluster.postgres.execute(change)
        self.undo.callback(self.cluster.postgres.execute, back)

    def scontrol(self, change: str, back: str) -> None:
        self.undo.callback(self.cluster.command, "scontrol", *back.split())
        self.cluster.command("scontrol", *change.split())


@pytest.fixture(scope="module")
def installed(scratch: Path) -> Iterator[DevCluster]:
    """A cluster with hooks, configuration, schema and a leader."""
    with DevCluster(scratch / "doctor", nodes=1, accounting=True) as cluster:
        site = Site(cluster, ExitStack())
        write_configuration(cluster, site.config, slurm={"lease_s": 120.0})
        done = site.polluxctl("hooks", "install", "--yes")
        assert done.exit_code == 0, done.output
        loaded = load_config(site.config)
        store = Store(loaded.database.url, cluster.cluster_name, lease_s=600)
        store.migrate()
        assert store.lead() is not None
        yield cluster
        store.close()


@pytest.fixture
def site(installed: DevCluster) -> Iterator[Site]:
    with ExitStack() as undo:
        yield Site(installed, undo)


def test_a_sound_installation_has_no_fault(site: Site) -> None:
    assert site.doctor() == {}
    assert "pollux-doctor" not in site.cluster.command("squeue", "-h", "-o", "%j")
    site.beat(0)
    assert site.doctor() == {}


Plant = Callable[[Site], object]

Fault = tuple[str, str, Plant]
"""The check that finds it, words of the remedy, and how it is planted."""


def hook(path: str, old: str, new: str) -> Fault:
    """The installed hooks or their settings differ from what the configuration says."""
    return "hooks", "hooks install", lambda s: s.edit(s.etc / path, old, new)


def script(old: str, new: str, name: str = "job_submit.lua") -> Fault:
    """slurmctld's Lua does not do its work, which a test job shows."""
    return "canary", "slurmctld's log", lambda s: s.lua(old, new, name)


def config(check: str, remedy: str, old: str, new: str) -> Fault:
    return check, remedy, lambda s: s.edit(s.config, old, new)


def sql(check: str, remedy: str, change: str, back: str) -> Fault:
    return check, remedy, lambda s: s.sql(change, back)


def scontrol(check: str, remedy: str, change: str, back: str) -> Fault:
    return check, remedy, lambda s: s.scontrol(change, back)


def slurm_conf(check: str, remedy: str, old: str, new: str) -> Fault:
    return check, remedy, lambda s: s.slurm_conf(old, new)


PARTITION = "update partitionname=pollux state="
FORGET = (
    "CREATE TABLE away AS SELECT * FROM pollux.schema_migration WHERE name LIKE '0001%';"
    "DELETE FROM pollux.schema_migration WHERE name LIKE '0001%'"
)
REMEMBER = "INSERT INTO pollux.schema_migration SELECT * FROM away; DROP TABLE away"
LEASE = "UPDATE pollux.leader SET lease_until = now() {} interval '1 day'"
LIMIT = "ALTER ROLE pollux_daemon CONNECTION LIMIT"
WORKS = "create reservation=works starttime=now+60minutes duration=60 nodes=ALL users=root flags=maint"
END = "-- END Pollux"
OWN_FILTER = f"{END}\nfunction slurm_cli_pre_submit() return slurm.SUCCESS end"
ADDRESS = 'addresses = ["http://127.0.0.'

FILES: dict[str, Fault] = {
    "the cluster's name": config("cluster-name", 'set cluster = "dev"', '"dev"', '"div"'),
    "a hook of another version": hook("hooks/directives.lua", "READERS", "Readers"),
    "an unreadable hook": (
        "hooks",
        "hooks install",
        lambda s: s.chmod(s.etc / "hooks/directives.lua", 0o600),
    ),
    "job_submit.lua without Pollux": hook("job_submit.lua", "BEGIN Pollux", "x"),
    "another gateway in the hook": hook("polluxd.toml", f"{ADDRESS}1", f"{ADDRESS}2"),
    "another lease in the hook": hook("polluxd.toml", "lease_s = 120.0", "lease_s = 77.0"),
    "no cli_filter.lua": ("hooks", "hooks install", lambda s: s.away(s.etc / "cli_filter.lua")),
    "polluxd's password": config("database", "pg_hba.conf", "pollux_daemon:", "pollux_daemon:x"),
    "no gateway": (
        "gateway",
        "polluxd-gateway",
        lambda s: (s.undo.callback(s.cluster.gateways.start), s.cluster.gateways.stop()),
    ),
    "no configuration": ("configuration", "example-config", lambda s: s.away(s.config)),
    "a missing device": ("devices", "driver", lambda s: s.away(s.cluster.directory / "dev/gpu2")),
    "an older schema": sql("schema", "db upgrade", FORGET, REMEMBER),
    "a role that cannot log in": sql(
        "roles", "db init", "ALTER ROLE pollux_read NOLOGIN", "ALTER ROLE pollux_read LOGIN"
    ),
    "nobody leads": sql("leader", "systemctl", LEASE.format("-"), LEASE.format("+")),
    "a partition is down": scontrol("partition", "state=up", f"{PARTITION}down", f"{PARTITION}up"),
    "a node is drained": scontrol(
        "nodes", "resume", "update nodename=n1 state=drain reason=test", "update nodename=n1 state=resume"
    ),
    "the site's own function below Pollux' lines": script(
        END, f"{END}\nfunction slurm_job_submit() return slurm.SUCCESS end"
    ),
    "a hook that is not called": script("pcall(dofile,", 'false, "off" --'),
    "a hook that Lua cannot read": script("function", "func tion", "hooks/directives.lua"),
    "a job_submit.lua that Lua cannot read": script(END, f"{END}\nfunction ("),
    "a cli_filter.lua that passes Pollux by": (
        "canary",
        "CliFilterPlugins",
        lambda s: s.edit(s.etc / "cli_filter.lua", END, OWN_FILTER),
    ),
    "a heartbeat that slurmctld cannot read": (
        "canary",
        "chmod 755",
        lambda s: (s.beat(0), s.lua("polluxd/heartbeat", "polluxd/hidden/heartbeat")),
    ),
    "an old heartbeat": ("heartbeat", "systemctl", lambda s: s.beat(1000)),
    "no connection left for polluxd": sql("database", "max_connections", f"{LIMIT} 0", f"{LIMIT} -1"),
    "a passfile for everybody": ("passfile", "chmod 600", lambda s: s.secret("passfile", "database")),
    "a configuration of another program": config(
        "configuration", "example-config", "[moves]\n", "[moves]\nspeed = 3\n"
    ),
    "hooks that anybody can change": ("hooks", "chmod 755", lambda s: s.chmod(s.etc / "hooks", 0o777)),
    "a partition takes no jobs": scontrol("partition", "state=up", f"{PARTITION}inactive", f"{PARTITION}up"),
    "a maintenance ahead": scontrol(
        "reservation", "delete reservation=works", WORKS, "delete reservation=works"
    ),
}


def munge_frozen(site: Site) -> None:
    daemon = site.cluster.munged
    site.undo.callback(daemon.send, signal.SIGCONT)
    daemon.send(signal.SIGSTOP)


REQUEUE = "JobRequeue=1\n"
PROLOG = "JobRequeue=1\nProlog=/bin/true\nPrologEpilogTimeout={}\n"

SLURM: dict[str, Fault] = {
    "no submission hook": slurm_conf("plugins", "JobSubmitPlugins=lua", "JobSubmitPlugins=lua\n", ""),
    "no requeue": slurm_conf("requeue", "JobRequeue=1", REQUEUE, "JobRequeue=0\n"),
    "a long wait after a requeue": slurm_conf(
        "requeue", "cred_expire", "AuthInfo=", "AuthInfo=cred_expire=900,"
    ),
    "no filter of sbatch": slurm_conf("plugins", "CliFilterPlugins=lua", "CliFilterPlugins=lua\n", ""),
    "no slurmdbd": (
        "slurmdbd",
        "set up slurmdbd",
        lambda s: (
            # slurmctld does not start with it and without slurmdbd.
            s.slurm_conf("AccountingStorageTRES=gres/gpu\n", ""),
            s.slurm_conf("accounting_storage/slurmdbd", "accounting_storage/none"),
        ),
    ),
    "GPUs that Slurm does not count": slurm_conf(
        "accounting", "AccountingStorageTRES", "AccountingStorageTRES=gres/gpu\n", ""
    ),
    "ended jobs are forgotten at once": slurm_conf(
        "memory", "MinJobAge=300", "MinJobAge=7200", "MinJobAge=2"
    ),
    "a slow scheduler": slurm_conf(
        "scheduler", "start_timeout_s = 120", "sched_min_interval=0", "sched_min_interval=40000000"
    ),
    "a scheduler that batches": slurm_conf(
        "scheduler", "batch_sched_delay", "batch_sched_delay=0", "batch_sched_delay=60"
    ),
    "a prolog that may take minutes": slurm_conf(
        "scripts", "training_timeout_s = 960", REQUEUE, PROLOG.format(900)
    ),
    "a prolog without any time": slurm_conf("scripts", "PrologEpilogTimeout=60", REQUEUE, PROLOG.format(3)),
    "slurmctld is down": (
        "slurmctld",
        "start slurmctld",
        lambda s: (s.undo.callback(s.cluster.start_slurmctld), s.cluster.stop_slurmctld()),
    ),
    "munged hangs": ("munge", "munge.key", munge_frozen),
}


@pytest.mark.parametrize("name", [*FILES, *(SLURM if ALL else {})])
def test_a_planted_fault_is_found(site: Site, name: str) -> None:
    check, remedy, plant = (FILES | SLURM)[name]
    plant(site)
    found = site.doctor()
    assert check in found, found
    assert any(remedy in finding["remedy"] for finding in found[check]), found[check]
    assert all(finding["remedy"] for each in found.values() for finding in each)


OWN_FILTER_OF_JOBS = """
local unchecked = slurm_job_submit
function slurm_job_submit(job, partitions, uid)
  if job.account == nil then
    slurm.log_user("this site asks every job for an account")
    return slurm.ERROR
  end
  return unchecked(job, partitions, uid)
end
"""


def test_a_site_that_asks_every_job_for_an_account(site: Site) -> None:
    site.lua(END, f"{END}\n{OWN_FILTER_OF_JOBS}")
    (refused,) = site.doctor()["canary"]
    assert "this site asks every job for an account" in refused["result"]
    assert "canary_options" in refused["remedy"]
    site.edit(site.config, "[slurm]\n", '[slurm]\ncanary_options = ["--account=root"]\n')
    assert "canary" not in site.doctor()


def test_a_user_without_rights_in_slurm_is_found(site: Site) -> None:
    found = site.doctor(user="pollux")
    assert "adminlevel=operator" in found["rights"][0]["remedy"]
    assert any("polluxd.toml" in finding["result"] for finding in found["configuration"])
