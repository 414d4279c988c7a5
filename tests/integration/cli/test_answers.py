"""polluxctl of ordinary users, with real gateway, Slurm and munge."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from contrib.devcluster.processes import Daemon, free_ports, wait_until
from polluxd.site import slurm_checks
from polluxd.site.findings import Level
from polluxd.slurm.configuration import Slurm
from polluxd.store import Store
from tests.integration.store.slurm_job import seen

pytestmark = pytest.mark.slurm

BIN = Path(sys.executable).parent
CLUSTER = "answers"
ADA, BOB, DAEMON = (pwd.getpwnam(name) for name in ("nobody", "games", "daemon"))
PATIENCE_S = 60.0


def run_as(user, *argv, env):
    """Run a command as an ordinary user."""
    return subprocess.run(
        argv,
        user=user.pw_uid,
        group=user.pw_gid,
        extra_groups=[],
        capture_output=True,
        timeout=PATIENCE_S,
        env=env | {"HOME": "/", "COLUMNS": "200"},
        check=False,
        cwd="/",
    )


@pytest.fixture(scope="module")
def address(dev_cluster, scratch):
    """`polluxd gateway` as an unprivileged user."""
    store = Store(dev_cluster.database_url, CLUSTER, lease_s=3600)
    store.migrate()
    assert store.lead() is not None
    jobs = [
        seen(11, name="resnet", user="ada", uid=ADA.pw_uid, gpus_per_node_held={"n1": 2}),
        seen(12, name="bert", user="bob", uid=BOB.pw_uid, gpus_per_node_held={"n2": 1}),
    ]
    store.sync_jobs(jobs)
    (port,) = free_ports(1)
    folder = scratch / "answers"
    folder.mkdir(mode=0o755)
    config, passfile = folder / "polluxd.toml", folder / "gateway.pgpass"
    config.write_text(
        f'[slurm]\ncluster = "{CLUSTER}"\nconf = "{dev_cluster.slurm_conf}"\n'
        f'[database]\nurl = "{dev_cluster.database_url}"\n'
        f'[gateway]\nlisten = "127.0.0.1:{port}"\npassfile = "{passfile}"\n'
    )
    passfile.write_text(dev_cluster.postgres.gateway_passfile.read_text())
    for path in (config, passfile):
        path.chmod(0o600)
        os.chown(path, DAEMON.pw_uid, DAEMON.pw_gid)
    command = [str(BIN / "polluxd"), "gateway", "--config", str(config)]
    log, env = folder / "log", dev_cluster.client_environment
    server = Daemon("gateway", command, log, env=env, user=DAEMON.pw_name)
    server.start()
    wait_until(lambda: server.must_run() or "listens at" in log.read_text(), PATIENCE_S, "the gateway")
    yield f"http://127.0.0.1:{port}"
    assert server.stop(grace_s=PATIENCE_S) == 0, log.read_text()
    store.close()


@pytest.fixture
def polluxctl(dev_cluster, address):
    env = dev_cluster.client_environment | {"POLLUX_GATEWAY": address}
    env.pop("POLLUXD_CONFIG", None)
    return lambda user, *words: run_as(user, str(BIN / "polluxctl"), *words, env=env)


def test_users_without_any_secret_see_their_own_jobs_in_full(polluxctl):
    for user, own, theirs in ((ADA, 11, 12), (BOB, 12, 11)):
        done = polluxctl(user, "jobs", "--json", "-u", "all")
        assert done.returncode == 0, done.stderr
        assert [row["job_id"] for row in json.loads(done.stdout)] == [11, 12]
        assert f"Job {own} " in polluxctl(user, "explain", str(own)).stdout.decode()
        refused = polluxctl(user, "explain", str(theirs))
        assert refused.returncode == 1
        assert refused.stderr.startswith(f"polluxctl: job {theirs} is another user's".encode())
    assert b"resnet" in polluxctl(ADA, "top", "-u", "all").stdout
    assert b"has no reports" in polluxctl(ADA, "history", "11").stderr


@contextlib.contextmanager
def page(dev_cluster, address, user, *words):
    """Run `polluxctl web` as a user; yield a browser that has opened its URL, and where the pages are."""
    env = dev_cluster.client_environment | {"POLLUX_GATEWAY": address, "HOME": "/", "PYTHONUNBUFFERED": "1"}
    env.pop("POLLUXD_CONFIG", None)
    rights = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    command = [BIN / "polluxctl", "web", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env, cwd="/", **rights) as server:
        try:
            url = server.stdout.readline().decode().strip()
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            assert browser.open(url, timeout=PATIENCE_S).status == 200
            yield browser, url.partition("?")[0]
        finally:
            server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0


def test_the_live_page_has_the_rights_of_its_caller(dev_cluster, address, scratch):
    def text(browser, url):
        return browser.open(url, timeout=PATIENCE_S).read().decode()

    with page(dev_cluster, address, ADA) as (browser, url):
        cluster = text(browser, url)
        assert "/jobs/11" in cluster
        assert "bert" in cluster
        assert "/jobs/12" not in cluster
        assert "Job 11 (resnet)" in text(browser, f"{url}jobs/11")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            text(browser, f"{url}jobs/12")
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(url, timeout=PATIENCE_S)
    with page(dev_cluster, address, DAEMON, "--config", scratch / "answers" / "polluxd.toml") as (
        browser,
        url,
    ):
        assert "/jobs/12" in text(browser, url)


def test_the_doctor_knows_whether_the_gateway_answers(dev_cluster, address, monkeypatch):
    slurm = Slurm(dev_cluster.slurm_conf)
    monkeypatch.setenv("POLLUX_GATEWAY", address)
    assert [found.level for found in slurm_checks.gateway(slurm)] == [Level.OK]
    monkeypatch.setenv("POLLUX_GATEWAY", "http://127.0.0.1:1")
    (gone,) = slurm_checks.gateway(slurm)
    assert (gone.level, "polluxd-gateway" in gone.remedy) == (Level.WARNING, True)


def test_a_user_who_listens_in_the_place_of_the_gateway_learns_nothing(dev_cluster):
    """Without TLS, the listening socket has to belong to a system account."""
    (port,) = free_ports(1)
    program = (
        "import os, socket\n"
        f"server = socket.create_server(('127.0.0.1', {port}))\n"
        "print('listening', flush=True)\n"
        "print(server.accept()[0].recv(10000), flush=True)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], user=65534, group=65534, extra_groups=[], stdout=subprocess.PIPE
    ) as thief:
        assert thief.stdout.readline() == b"listening\n"
        env = dev_cluster.client_environment | {"POLLUX_GATEWAY": f"http://127.0.0.1:{port}"}
        env.pop("POLLUXD_CONFIG", None)
        done = run_as(BOB, str(BIN / "polluxctl"), "jobs", env=env)
        assert b"uid 65534 listens" in done.stderr
        assert thief.stdout.readline() in (b"b''\n", b"")
        thief.kill()
