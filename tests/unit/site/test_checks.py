"""Checks that a private cluster cannot be made to fail."""

from __future__ import annotations

import os
import pwd
import tempfile
import time
from pathlib import Path

import pytest

from polluxd.errors import SlurmRefused
from polluxd.site import file_checks, slurm_checks, trials
from polluxd.site.findings import Level
from polluxd.site.hooks import Role, Site
from tests import build

SETTINGS = {
    "ClusterName": "main",
    "SLURM_VERSION": "24.11.4",
    "SlurmUser": "slurm(64030)",
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "JobSubmitPlugins": "lua",
    "CliFilterPlugins": "cli_filter/lua",
    "TaskProlog": "/site/task_prolog",
    "GresTypes": "gpu",
    "SelectType": "select/cons_tres",
    "JobRequeue": "1",
}


class StubSlurm:
    """Slurm as a table of settings, and a level of polluxd's user."""

    def __init__(self, level="Operator", **settings):
        self.level = level
        self.table = {**SETTINGS, "at": f"{time.time():.0f}", **settings}

    def settings(self):
        return self.table

    def ask(self, *argv, given=""):
        if argv[0] == "sacctmgr":
            return f"{self.level}\n"
        raise SlurmRefused("no")


def found(slurm, tmp_path, user="pollux"):
    site = Site(tmp_path / "slurm.conf", user=user)
    checks = slurm_checks.cluster(slurm, site, None, [Role.CONTROLLER])
    return {each.check: each for each in checks if each.level is not Level.OK and each.check != "slurmctld"}


def test_a_sound_slurm(tmp_path):
    assert found(StubSlurm(), tmp_path) == {}


def test_what_isolation_asks_of_jobs_is_said_and_no_fault(tmp_path):
    settings = {
        "JobContainerType": "job_container/tmpfs",
        "ConstrainRAMSpace": "yes",
        "PrologFlags": "Alloc,Contain",
    }
    slurm = StubSlurm(**settings)
    assert found(slurm, tmp_path) == {}
    checks = slurm_checks.cluster(slurm, Site(tmp_path / "slurm.conf"), None, [Role.NODE])
    said = " ".join(each.result for each in checks if each.check == "isolation")
    assert all(word in said for word in (*settings, "/tmp", "--mem"))
    none = StubSlurm(JobContainerType="job_container/none", ConstrainRAMSpace="no")
    checks = slurm_checks.cluster(none, Site(tmp_path / "slurm.conf"), None, [Role.NODE])
    assert "isolation" not in {each.check for each in checks}


@pytest.mark.parametrize(
    ("settings", "check", "remedy"),
    [
        ({"SLURM_VERSION": "20.11.9"}, "slurm-version", "22.05"),
        ({"at": f"{time.time() - 3600:.0f}"}, "clock", "NTP"),
        ({"at": "2026-01-01T00:00:00"}, "clock", "NTP"),
        ({"GresTypes": ""}, "gres", "GresTypes=gpu"),
        ({"SelectType": "select/linear"}, "gres", "cons_tres"),
        ({"CliFilterPlugins": ""}, "plugins", "CliFilterPlugins=lua"),
        ({"level": "None"}, "rights", "adminlevel=operator"),
        ({"level": ""}, "rights", "adminlevel=operator"),
        ({"SLURM_VERSION": "22.05.8", "Prolog": "/etc/prolog"}, "restarts", "24.11"),
        ({"SLURM_VERSION": "22.05.8", "JobContainerType": "job_container/tmpfs"}, "restarts", "cred_expire"),
        ({"SLURM_VERSION": "24.11.5"}, "requeue-crash", "26.05.3"),
        ({"SLURM_VERSION": "26.05.3"}, "requeue-crash", "26.05.3"),
    ],
)
def test_a_fault_of_slurm(tmp_path, settings, check, remedy):
    faults = found(StubSlurm(**settings), tmp_path)
    assert list(faults) == [check]
    assert remedy in faults[check].remedy


class HidingSlurm(StubSlurm):
    """Slurm without PrivateData=cloud: two of three nodes are powered down."""

    def ask(self, *argv, given=""):
        if argv[-1] == "node":
            return "NodeName=n1 CPUTot=8 Gres=gpu:4 State=IDLE+CLOUD Partitions=main\n"
        if argv[-1] == "partition":
            return "PartitionName=main Nodes=n[1-3] State=UP\n"
        if argv[-1] == "reservation":
            return "No reservations in the system\n"
        return super().ask(*argv, given=given)


def test_nodes_that_slurm_hides_are_named(tmp_path):
    faults = found(HidingSlurm(), tmp_path)
    assert list(faults) == ["nodes"]
    assert "2 nodes of partitions (n2, n3, ...)" in faults["nodes"].result
    assert "PrivateData=cloud" in faults["nodes"].remedy


def test_scripts_that_slurm_numbers_are_found(tmp_path, monkeypatch):
    table = {key: value for key, value in SETTINGS.items() if key != "TaskProlog"}
    printed = f"Configuration data as of {time.time():.0f}\n" + "".join(
        f"{key:<23} = {value}\n"
        for key, value in {
            **table,
            "Prolog[0]": "/site/prolog",
            "TaskProlog[0]": "/site/one",
            "TaskProlog[1]": "/site/two",
        }.items()
    )
    real = slurm_checks.Slurm(None)
    monkeypatch.setattr(real, "ask", lambda *argv, given="": printed)
    settings = real.settings()
    assert settings["TaskProlog"] == "/site/one,/site/two"
    assert found(StubSlurm(**settings), tmp_path) == {}


def test_slurmuser_needs_no_rights(tmp_path):
    assert found(StubSlurm(level=""), tmp_path, user="slurm") == {}


@pytest.mark.skipif(os.geteuid() != 0, reason="gives files to other users")
def test_files_that_polluxd_cannot_read_or_everybody_can(tmp_path):
    path, key, passfile = (tmp_path / name for name in ("polluxd.toml", "key", "pgpass"))
    for each in (path, key, passfile):
        each.write_text("x" * 32)
    path.chmod(0o600)  # root's: polluxd cannot read it, as `chmod 600` once advised
    key.chmod(0o644)
    passfile.chmod(0o640)
    config = build.config(
        database={"passfile": str(passfile)}, gateway={"tls_certificate": str(key), "tls_key": str(key)}
    )
    user = pwd.getpwuid(1).pw_name
    said = {
        (each.check, each.result)
        for each in file_checks.configuration_files(config, path, user)
        if each.remedy
    }
    assert ("configuration", f"{user} cannot read {path} (mode 0600, owner 0:0)") in said
    assert any(check == "tls" and "any user could pose as the gateway" in words for check, words in said)
    assert any(check == "passfile" and "libpq ignores" in words for check, words in said)


def test_a_node_needs_the_devices_of_its_own_lines_in_gres_conf_alone(tmp_path):
    (tmp_path / "gres.conf").write_text(
        f"""AutoDetect=off
NodeName=gpu[01-02] Name=gpu Type=rtx File=/dev/null
NodeName=dgx01 Name=gpu Type=a100 File={tmp_path}/nvidia[0-1] Cores=0-7
File={tmp_path}/card NodeName=old name=gpu # Name=gpu File={tmp_path}/never
NodeName=dgx01 Name=nic File={tmp_path}/mlx
NodeName=s2 Name=gpu File={tmp_path}/shared
"""
    )
    site = Site(tmp_path / "slurm.conf")
    site.slurm_conf.write_text("Include nodes.conf\nNodeName=s[1-2] NodeHostname=box Port=[7001-7002]\n")
    (tmp_path / "nodes.conf").write_text("NodeName=dgx[01-02] NodeHostname=rack[1-2]\n")
    said = {
        name: [each.result for each in file_checks.gpu_devices(site, [name]) if each.level is Level.FAULT]
        for name in ("gpu02", "dgx01", "old", "login", "box", "rack1", "rack2")
    }
    assert said["gpu02"] == said["login"] == said["rack2"] == []
    assert f"names {tmp_path}/nvidia0, {tmp_path}/nvidia1: no such" in said["dgx01"][0]
    assert said["rack1"] == said["dgx01"]
    assert f"names {tmp_path}/card: no such" in said["old"][0]
    assert f"names {tmp_path}/shared: no such" in said["box"][0]
    (good,) = file_checks.gpu_devices(site, ["login"])
    assert (good.level, "`pollux selftest` here tests" in good.result) == (Level.OK, True)


@pytest.mark.parametrize(
    ("settings", "check", "remedy"),
    [
        ({"MinJobAge": "2 sec"}, "memory", "MinJobAge=300"),
        ({"SchedulerParameters": "defer,sched_min_interval=40000000"}, "scheduler", "start_timeout_s = 120"),
        ({"SchedulerParameters": "batch_sched_delay=60"}, "scheduler", "start_timeout_s = 180"),
        ({"AccountingStorageTRES": "cpu,mem,gres/gpu:a100"}, "accounting", "gres/gpu"),
        ({"PrologEpilogTimeout": "900", "Epilog": "/site/epilog"}, "scripts", "training_timeout_s = 960"),
        ({"PrologEpilogTimeout": "3", "Prolog": "/site/prolog"}, "scripts", "PrologEpilogTimeout=60"),
        ({"SchedulerParameters": "defer,requeue_delay=1"}, "requeue", "requeue_delay=30"),
    ],
)
def test_a_pace_that_polluxd_cannot_keep(settings, check, remedy):
    sound = {
        **{key: value for key, value in SETTINGS.items() if key != "TaskProlog"},
        "AccountingStorageTRES": "cpu,mem,gres/gpu",
        "MinJobAge": "300 sec",
        "SchedulerParameters": "defer,sched_min_interval=2000000",
        "PrologEpilogTimeout": "65534",
    }
    assert list(slurm_checks.pace(sound, None)) == []
    (found,) = slurm_checks.pace(sound | settings, None)
    assert (found.check, remedy in found.remedy) == (check, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="reads as another user")
def test_a_heartbeat_that_slurm_s_user_cannot_read(scratch_folder):
    folder = scratch_folder / "run"
    folder.mkdir()
    config = build.config(slurm={"heartbeat_file": str(folder / "heartbeat")})
    assert list(trials.heartbeat("nobody", config)) == [], "no polluxd has run yet"
    (folder / "heartbeat").write_text(f"{time.time():.0f}\n")
    folder.chmod(0o755)
    assert list(trials.heartbeat("nobody", config)) == []
    folder.chmod(0o700)
    (found,) = trials.heartbeat("nobody", config)
    assert (found.check, found.level) == ("heartbeat", Level.FAULT)
    assert f"chmod 755 {folder}" in found.remedy


@pytest.fixture
def scratch_folder():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
