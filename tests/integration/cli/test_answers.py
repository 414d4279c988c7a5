"""polluxctl of ordinary users, on a real Slurm, munge and Postgres."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from contrib.devcluster.processes import free_ports
from polluxd.answers import wire
from polluxd.answers.client import AnswersClient
from polluxd.answers.controllers import munge_socket
from polluxd.answers.munge import Munge, MungeError
from polluxd.answers.server import AnswerServer, Bounds
from polluxd.answers.wire import Explain, Jobs, read_answer, request_line
from polluxd.errors import PolluxError
from polluxd.site import slurm_checks
from polluxd.site.findings import Level
from polluxd.site.slurm_checks import Slurm
from polluxd.store import Store
from tests.integration.store.slurm_job import Seen

pytestmark = pytest.mark.slurm

BIN = Path(sys.executable).parent
CLUSTER = "answers"
ADA, BOB, DAEMON = (pwd.getpwnam(name) for name in ("nobody", "games", "daemon"))
PATIENCE_S = 60.0
LONG = Bounds(request_s=PATIENCE_S, answer_s=PATIENCE_S, connections=4)


@pytest.fixture(scope="module")
def munge(dev_cluster):
    return Munge(munge_socket(dev_cluster.command("scontrol", "show", "config")))


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
def polluxctl(dev_cluster, scratch):
    """`polluxd answer` as an unprivileged user, and polluxctl as another."""
    store = Store(dev_cluster.database_url, CLUSTER, lease_s=3600)
    store.migrate()
    assert store.lead() is not None
    jobs = [
        Seen(11, "resnet", "ada", uid=ADA.pw_uid, gpus_per_node_held={"n1": 2}),
        Seen(12, "bert", "bob", uid=BOB.pw_uid, gpus_per_node_held={"n2": 1}),
    ]
    store.sync_jobs(jobs)
    (port,) = free_ports(1)
    folder = scratch / "answers"
    folder.mkdir(mode=0o755)
    config = folder / "polluxd.toml"
    config.write_text(
        f'[slurm]\ncluster = "{CLUSTER}"\nconf = "{dev_cluster.slurm_conf}"\n'
        f'[database]\nurl = "{dev_cluster.database_url}"\n[answers]\nlisten = "127.0.0.1:{port}"\n'
    )
    config.chmod(0o600)
    os.chown(config, DAEMON.pw_uid, DAEMON.pw_gid)
    log = folder / "log"
    with log.open("wb") as said:
        server = subprocess.Popen(
            [BIN / "polluxd", "answer", "--config", config],
            user=DAEMON.pw_uid,
            group=DAEMON.pw_gid,
            extra_groups=[],
            env=dev_cluster.client_environment,
            stderr=said,
        )
    until = time.monotonic() + PATIENCE_S
    while b"answers users at" not in log.read_bytes():
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < until, log.read_text()
        time.sleep(0.05)
    env = dev_cluster.client_environment | {"POLLUX_SERVER": f"127.0.0.1:{port}"}
    env.pop("POLLUXD_CONFIG", None)
    yield lambda user, *words: run_as(user, str(BIN / "polluxctl"), *words, env=env)
    server.send_signal(signal.SIGTERM)
    assert server.wait(PATIENCE_S) == 0, log.read_text()
    store.close()


def test_users_without_any_secret_see_their_own_jobs_in_full(polluxctl):
    for user, own, theirs in ((ADA, 11, 12), (BOB, 12, 11)):
        done = polluxctl(user, "jobs", "--json")
        assert done.returncode == 0, done.stderr
        assert [row["job_id"] for row in json.loads(done.stdout)] == [11, 12]
        assert f"Job {own} " in polluxctl(user, "explain", str(own)).stdout.decode()
        refused = polluxctl(user, "explain", str(theirs))
        assert refused.returncode == 1
        assert b"another user's" in refused.stderr
    assert b"resnet" in polluxctl(ADA, "top").stdout
    assert b"has no reports" in polluxctl(ADA, "history", "11").stderr


def test_the_doctor_knows_whether_users_have_answers(munge, dev_cluster, monkeypatch):
    slurm = Slurm(dev_cluster.slurm_conf)
    with serving(munge, lambda _question, uid: uid, LONG) as (host, port):
        monkeypatch.setenv("POLLUX_SERVER", f"{host}:{port}")
        assert [found.level for found in slurm_checks.answers(slurm)] == [Level.OK]
    (gone,) = slurm_checks.answers(slurm)
    assert (gone.level, "polluxd-answers" in gone.remedy) == (Level.WARNING, True)


@contextmanager
def serving(munge, answer, bounds):
    """Serve in a thread; yield the address."""
    loop, ready, found = asyncio.new_event_loop(), threading.Event(), []
    server = AnswerServer(munge, answer, bounds)

    async def main() -> None:
        listening = await server.listen("127.0.0.1:0")
        found.append(listening.sockets[0].getsockname())
        stopped.append(asyncio.Event())
        ready.set()
        async with listening:
            await stopped[0].wait()

    stopped: list[asyncio.Event] = []
    thread = threading.Thread(target=loop.run_until_complete, args=(main(),))
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield found[0]
    finally:
        loop.call_soon_threadsafe(stopped[0].set)
        thread.join(PATIENCE_S)
        loop.close()


def client_of(address, munge):
    return AnswersClient([address], munge, frozenset())


def said_by(address, *parts: bytes) -> bytes:
    """Return all that the server sends until it hangs up."""
    with closing(socket.create_connection(address, timeout=PATIENCE_S)) as raw:
        received = b""
        with suppress(ConnectionError):
            for part in parts:
                raw.sendall(part)
            while data := raw.recv(65536):
                received += data
                if received.endswith(b"\n\n"):
                    break
        return received


def test_silent_clients_keep_nobody_waiting(munge):
    with serving(munge, lambda _question, uid: uid, LONG) as address:
        silent = [socket.create_connection(address, timeout=PATIENCE_S) for _ in range(12)]
        assert client_of(address, munge).ask(Jobs()) == os.getuid()
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b""  # the oldest gave way
        for each in silent:
            each.close()


def test_a_client_that_sends_nothing_whole_is_hung_up_on(munge):
    with (
        serving(munge, lambda _question, _uid: 0, Bounds(request_s=0.2)) as address,
        closing(socket.create_connection(address, timeout=PATIENCE_S)) as slow,
        suppress(ConnectionResetError),
    ):
        slow.sendall(b"MUNGE:")
        assert slow.recv(1) == b""


def test_what_is_no_request_gets_no_answer(munge):
    def answer(_question, _uid):
        raise AssertionError("asked")

    with serving(munge, answer, LONG) as address:
        assert said_by(address, b"A" * 100_000) == b""
        for junk in (
            b"GET / HTTP/1.1\n",
            b"\x00\xff\n",
            b"MUNGE:AwQDAAD:\n",
            munge.encode(b"[" * 3000) + b"\n",
        ):
            assert said_by(address, junk).startswith(b"!") or len(junk) > wire.LONGEST_REQUEST
        for payload in (
            b"",
            b"{}",
            b'{"ask":"settings","nonce":"0123456789abcdef"}',
            b'{"ask":"jobs","ended":1}',
        ):
            assert b"does not know this question" in said_by(address, munge.encode(payload) + b"\n")
        for job in (0, -1, 2**32, 10**30):
            payload = json.dumps({"ask": "explain", "job": job, "nonce": "0123456789abcdef"}).encode()
            assert b"does not know this question" in said_by(address, munge.encode(payload) + b"\n")


def test_a_request_counts_once(munge):
    with serving(munge, lambda _question, uid: uid, LONG) as address:
        line = request_line(munge, Jobs())
        assert not said_by(address, line).startswith(b"!")
        assert b"replayed" in said_by(address, line).lower()


def test_only_the_asking_user_can_read_an_answer(munge, dev_cluster):
    """A program that passes a user's request on learns nothing."""
    question = Explain(job=7)
    socket_name = str(munge_socket(dev_cluster.command("scontrol", "show", "config")))
    with serving(munge, lambda _question, uid: {"uid": uid}, LONG) as address:
        made = run_as(
            ADA,
            *("munge", "--socket", socket_name, "--string", question.model_dump_json()),
            env=dev_cluster.client_environment,
        )
        answer = said_by(address, made.stdout.strip() + b"\n")
    with pytest.raises(MungeError, match="Unauthorized"):
        read_answer(munge, question.nonce, answer.splitlines()[:-1], frozenset())


def test_a_user_cannot_answer_in_the_place_of_polluxd(munge, dev_cluster):
    socket_name = str(munge_socket(dev_cluster.command("scontrol", "show", "config")))
    forged = run_as(
        ADA, "munge", "--socket", socket_name, "--string", "x", env=dev_cluster.client_environment
    )
    with pytest.raises(PolluxError, match=f"comes from uid {ADA.pw_uid}"):
        read_answer(munge, "n", [forged.stdout], frozenset())


def test_an_answer_to_another_question_is_refused(munge):
    lines = wire.answer_lines(munge, "another nonce", os.getuid(), {"a": 1})[:-1]
    with pytest.raises(PolluxError, match="no question of this polluxctl"):
        read_answer(munge, "nonce", lines, frozenset())


def test_a_large_answer_comes_whole(munge):
    rows = [{"job_id": number, "name": os.urandom(40).hex()} for number in range(10_000)]
    with serving(munge, lambda _question, _uid: rows, LONG) as address:
        assert client_of(address, munge).ask(Jobs()) == rows


def test_one_user_has_two_requests_at_a_time(munge):
    going, begun = threading.Event(), threading.Semaphore(0)

    def answer(_question, uid):
        begun.release()
        assert going.wait(PATIENCE_S)
        return uid

    with serving(munge, answer, Bounds(request_s=PATIENCE_S, of_one_user=1)) as address:
        answers: list[int] = []
        first = threading.Thread(target=lambda: answers.append(client_of(address, munge).ask(Jobs())))
        first.start()
        assert begun.acquire(timeout=PATIENCE_S)
        with pytest.raises(PolluxError, match="1 requests under way"):
            client_of(address, munge).ask(Jobs())
        going.set()
        first.join(PATIENCE_S)
        assert answers == [os.getuid()]
        # Its place is free once its client has hung up.
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert client_of(address, munge).ask(Jobs()) == os.getuid()
                break
            except PolluxError:
                assert time.monotonic() < until


def test_a_fault_costs_that_answer_alone(munge, caplog):
    def answer(question, uid):
        if isinstance(question, Explain):
            raise ZeroDivisionError("secret detail")
        return uid

    with serving(munge, answer, LONG) as address:
        with pytest.raises(PolluxError, match="a fault in polluxd: its log") as told:
            client_of(address, munge).ask(Explain(job=1))
        assert "secret" not in str(told.value)
        assert client_of(address, munge).ask(Jobs()) == os.getuid()
