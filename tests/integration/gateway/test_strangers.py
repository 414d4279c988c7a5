"""Names that cost nothing buy nothing: strangers, floods, answers that nobody reads, and a port that stays ours."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing
from urllib.parse import urlsplit

import pytest

from polluxd.errors import ConfigError
from polluxd.gateway.peers import Peers
from polluxd.gateway.server import GatewayServer
from polluxd.gateway.visitors import Bounds, Visitors
from tests.integration.gateway.serving import (
    PATIENCE_S,
    Caller,
    connect,
    document_of,
    serving,
    token_of,
    until_closed,
    user_token_of,
)

pytestmark = pytest.mark.slurm

AS_ANOTHER = """
import os, socket, sys
os.setuid(int(sys.argv[3]))
where = sys.argv[1], int(sys.argv[2])
made = [socket.create_connection(where, source_address=(f"127.0.0.{n + 1}", 0)) for n in range(int(sys.argv[4]))]
for each in made:
    each.sendall(b"G")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def strangers():
    """Opens connections of another user, from as many addresses."""
    with ExitStack() as stack:

        def begin(url: str, uid: int, number: int) -> None:
            parts = urlsplit(url)
            words = [sys.executable, "-c", AS_ANOTHER, parts.hostname, parts.port, uid, number]
            other = stack.enter_context(
                subprocess.Popen([str(w) for w in words], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            stack.callback(other.stdin.close)
            assert other.stdout.readline() == b"ready\n"

        yield begin


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of two users")
def test_a_client_of_this_machine_is_named_by_its_user(strangers):
    peers = Peers()
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::")):
        with closing(socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")) as listener:
            port = listener.getsockname()[1]
            strangers(f"http://127.0.0.1:{port}", 12345, 3)
            names = [peers.name(*listener.accept()) for _ in range(3)]
            assert names == ["uid 12345"] * 3, "whatever address they come from"
            with closing(socket.create_connection(("127.0.0.1", port))):
                assert peers.name(*listener.accept()) == "uid 0"
    peers.close()


def test_elsewhere_a_name_is_an_address_or_a_64(monkeypatch):
    class Accepted:
        def getsockname(self):
            return ("2001:db8::1", 9851, 0, 0)

    peers = Peers()
    monkeypatch.setattr(peers, "uid_of", lambda *_: None)
    assert peers.name(Accepted(), ("2001:db8:1:2:3:4:5:6", 5, 0, 0)) == "2001:db8:1:2::/64"
    assert peers.name(Accepted(), ("::ffff:192.0.2.7", 5, 0, 0)) == "192.0.2.7"
    assert peers.name(Accepted(), ("127.0.0.9", 5)) == "loopback"
    peers.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of two users")
def test_a_client_that_has_closed_its_socket_is_not_root():
    """The kernel says that a socket without a process is user 0's."""
    program = (
        "import os, socket, sys; os.setuid(12345)\n"
        "socket.create_connection(('127.0.0.1', int(sys.argv[1]))).sendall(b'G')\n"
    )
    peers = Peers()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        words = [sys.executable, "-c", program, str(listener.getsockname()[1])]
        subprocess.run(words, check=True)
        assert peers.name(*listener.accept()) == "loopback"
    peers.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of two users")
def test_strangers_of_one_user_give_way_before_those_of_others(records, cluster, strangers):
    bounds = Bounds(request_s=PATIENCE_S, strangers=8, strangers_of_name=6)
    with serving(records, cluster=cluster, bounds=bounds) as url, closing(connect(url)) as mine:
        mine.sendall(b"GET /v1/health HTTP/1.1\r\n")
        for uid in (12345, 12346):
            strangers(url, uid, 20)
        mine.sendall(b"Host: x\r\n\r\n")
        assert b" 200 " in document_of(mine), "the oldest of all, but of a name with one"


def test_whose_credential_is_looked_at_is_not_closed_for_a_stranger(records, cluster):
    decoding, going = threading.Event(), threading.Event()

    class Slow:
        def decode(self, credential):
            decoding.set()
            assert going.wait(PATIENCE_S)
            return json.dumps({"purpose": "user", "nonce": "0" * 32}).encode(), 1000

    bounds = Bounds(request_s=PATIENCE_S, strangers=8, strangers_of_name=4)
    answers = []
    with serving(records, cluster=cluster, munge=Slow(), bounds=bounds) as url, ExitStack() as stack:
        asking = threading.Thread(
            target=lambda: answers.append(
                Caller(url).ask("POST", "/v1/tokens", {"credential": "MUNGE:a:"})[0]
            )
        )
        asking.start()
        assert decoding.wait(PATIENCE_S)
        for _ in range(12):
            stack.enter_context(closing(connect(url))).sendall(b"G")
        # The newest stranger has been let in.
        assert Caller(url).ask("GET", "/v1/health")[0] == 200
        going.set()
        asking.join(PATIENCE_S)
    assert answers == [200]


class Munge:
    """Says that user 1000 made each credential."""

    def __init__(self, payload):
        self.payload = json.dumps(payload).encode()

    def decode(self, credential):
        return self.payload, 1000


def test_whose_credential_was_good_for_nothing_gives_way_as_others_do(records, cluster):
    """Any user makes credentials that munge vouches for."""
    bounds = Bounds(request_s=2 * PATIENCE_S, strangers=8, strangers_of_name=4)
    body = b'{"credential": "MUNGE:a:"}'
    with serving(records, cluster=cluster, munge=Munge({}), bounds=bounds) as url, ExitStack() as stack:
        made = []
        for _ in range(6):
            made.append(stack.enter_context(closing(connect(url))))
            head = f"POST /v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            made[-1].sendall(head.encode() + body)
            assert b" 422 " in document_of(made[-1])
        assert [until_closed(each) for each in made[:2]] == [b"", b""]


def test_whoever_sends_too_much_has_to_connect_again(records, cluster):
    """Else refusals would go out as fast as one client can ask."""
    with serving(records, cluster=cluster, munge=Munge({"purpose": "user", "nonce": "0" * 32})) as url:
        asking, answers = Caller(url), []
        while 429 not in answers:
            answers.append(asking.ask("POST", "/v1/tokens", {"credential": "MUNGE:a:"})[0])
            assert (asking.connection.sock is None) == (answers[-1] == 429)
        assert len(answers) > 1


def test_a_users_connections_are_not_looked_at_for_each_answer():
    """A user may have thousands of them."""

    class Known:
        name, token, uid, looks = "uid 1000", "", -1, 0

        def unread(self):
            Known.looks += 1
            return 0

    entrance, known = Visitors(Bounds(unread_bytes=10_000)), [Known() for _ in range(100)]
    for number, each in enumerate(known):
        entrance.arrive(each)
        entrance.recognise(each, 1000, f"token {number}")
    for _ in range(100):
        entrance.make_room(known[0], 200)
    assert 0 < Known.looks < 300


def test_one_users_question_does_not_wait_for_anothers(records, cluster):
    going = threading.Event()

    class Slow:
        def history(self, uid, job, since):
            return going.wait(PATIENCE_S) if uid < 1005 else uid

        explain = jobs = None

    with serving(records, cluster=cluster, questions=Slow()) as url:
        others = [Caller(url, user_token_of(records, uid)) for uid in range(1000, 1005)]
        waiting = [threading.Thread(target=each.ask, args=("GET", "/v1/jobs/7/history")) for each in others]
        for each in waiting:
            each.start()
        assert Caller(url, user_token_of(records, 2000)).ask("GET", "/v1/jobs/7/history") == (200, 2000)
        assert not going.is_set()
        going.set()
        for each in waiting:
            each.join(PATIENCE_S)


class Large:
    """Answers of 3 MB."""

    def jobs(self, uid, *, ended):
        return "x" * 3_000_000


def ask_unread(stack, url, token):
    raw = stack.enter_context(closing(connect(url)))
    raw.sendall(f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
    raw.recv(1)
    return raw


def test_a_user_who_reads_no_answers_loses_the_oldest(records, cluster):
    bounds = Bounds(request_s=PATIENCE_S, idle_s=PATIENCE_S)
    with serving(records, cluster=cluster, questions=Large(), bounds=bounds) as url, ExitStack() as stack:
        token = user_token_of(records)
        first, second, _ = (ask_unread(stack, url, token) for _ in range(3))
        assert len(until_closed(first)) < 3_000_000
        assert len(until_closed(second)) < 3_000_000
        other = Caller(url, user_token_of(records, 2000))
        assert len(other.ask("GET", "/v1/jobs")[1]) == 3_000_000


def test_an_answer_that_nobody_reads_has_a_deadline(records, cluster):
    bounds = Bounds(request_s=0.3, idle_s=PATIENCE_S)
    with serving(records, cluster=cluster, questions=Large(), bounds=bounds) as url, ExitStack() as stack:
        raw = ask_unread(stack, url, user_token_of(records))
        time.sleep(1.5)
        assert len(until_closed(raw)) < 3_000_000
        quick = Caller(url, user_token_of(records))
        assert len(quick.ask("GET", "/v1/jobs")[1]) == 3_000_000
        kept = quick.connection.sock
        time.sleep(1.0)
        assert len(quick.ask("GET", "/v1/jobs")[1]) == 3_000_000
        assert quick.connection.sock is kept


def test_a_second_question_before_the_answer_was_read_ends_the_connection(records, cluster):
    bounds = Bounds(request_s=PATIENCE_S, idle_s=PATIENCE_S)
    with serving(records, cluster=cluster, questions=Large(), bounds=bounds) as url, ExitStack() as stack:
        token = user_token_of(records)
        raw = ask_unread(stack, url, token)
        raw.sendall(f"GET /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        assert len(until_closed(raw)) < 3_000_000


def test_faults_write_one_line_a_minute(records, cluster, caplog):
    class Faulty:
        def jobs(self, uid, *, ended):
            raise ZeroDivisionError("a\nfault" * 1000)

    with serving(records, cluster=cluster, questions=Faulty()) as url, caplog.at_level(logging.INFO):
        user = Caller(url, user_token_of(records))
        for _ in range(20):
            assert user.code("GET", "/v1/jobs") == (500, "fault")
    said = [record for record in caplog.records if record.name.startswith("polluxd")]
    assert len(said) == 1
    assert len(said[0].getMessage()) < 1200
    assert "test_strangers.py" in said[0].getMessage()
    assert said[0].exc_info is None


def test_orders_end_with_the_job(records, cluster, store, seen):
    store.sync_jobs([seen(7), seen(8)])
    with serving(records, cluster=cluster) as url:
        ended, other = Caller(url, token_of(records, 7)), Caller(url, token_of(records, 8))
        for each in (ended, other):
            assert each.ask("GET", "/v1/orders")[0] == 200
        store.sync_jobs([seen(8, restart_count=1)])
        assert ended.code("GET", "/v1/orders") == (409, "attempt-over"), "Slurm has forgotten the job"
        assert other.code("GET", "/v1/orders") == (409, "attempt-over"), "a later attempt runs"
        assert other.code("GET", "/v1/orders") == (409, "attempt-over")


def test_the_port_may_be_systemds(monkeypatch):
    async def served(address, given):
        server = GatewayServer(None)
        found = await server.listen(address, given)
        await server.close()
        return found

    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        with pytest.raises(ConfigError, match="another address"):
            asyncio.run(served(f"127.0.0.1:{port}", []))
        with pytest.raises(ConfigError, match=r"systemctl edit polluxd-gateway\.socket"):
            asyncio.run(served("127.0.0.1:1", [held.dup()]))
        assert asyncio.run(served(f"127.0.0.1:{port}", [held.dup()])) == [("127.0.0.1", port)]
        assert held.getsockname()[1] == port, "it listens on, whoever serves"


def test_sockets_are_taken_over_from_systemd_alone():
    program = (
        "import os, sys\n"
        "from polluxd.gateway.server import given_by_systemd\n"
        "os.dup2(int(sys.argv[1]), 3)\n"
        "os.environ.update(LISTEN_PID='1', LISTEN_FDS='1'); assert given_by_systemd() == []\n"
        "os.environ['LISTEN_PID'] = str(os.getpid())\n"
        "print([s.getsockname()[1] for s in given_by_systemd()], given_by_systemd())\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as held:
        words = [sys.executable, "-c", program, str(held.fileno())]
        done = subprocess.run(words, pass_fds=[held.fileno()], capture_output=True, text=True, check=True)
        assert done.stdout == f"[{held.getsockname()[1]}] []\n"


def test_a_known_token_waits_behind_no_strangers(records, cluster, store, seen):
    """Strangers of the same name are answered at a pace; whoever has shown a token is not of them."""
    store.sync_jobs([seen(7)])
    with serving(records, cluster=cluster) as url:
        job = Caller(url, token_of(records, 7))
        assert job.ask("GET", "/v1/orders")[0] == 200
        flood = [Caller(url, f"J.7.0.{number:043d}") for number in range(300)]
        for each in flood:
            each.connection.request("GET", "/v1/orders", headers={"Authorization": f"Bearer {each.token}"})
        assert job.ask("POST", "/v1/acknowledgements", {"move": 1})[0] == 200
        assert flood[-1].connection.getresponse().status == 401, "in its turn"
