"""The HTTP client: what it trusts, what it reads, and what its errors say."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pollux.scheduler.gateway import (
    AttemptOver,
    Gateway,
    GatewayAway,
    MessageRefused,
    Superseded,
    TokenRefused,
    TooOften,
)
from pollux.scheduler.listener import UntrustedListener, first_user, require_trusted_listener
from tests.certificate import certificate
from tests.unit.agent.scheduler.fake_gateway import FakeGateway, Refusal, serving

TOKEN = "J.7.2." + "feedface" * 5


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    made = FakeGateway()
    made.tokens.add(TOKEN)
    yield made
    made.close()


@pytest.fixture(scope="module")
def own_certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return certificate(tmp_path_factory.mktemp("tls") / "certificate.pem", "localhost", "DNS:localhost")


def serve_raw(answer: bytes, context: ssl.SSLContext | None = None) -> int:
    """Give `answer` to every request; return the port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
                if context is not None:
                    connection = context.wrap_socket(connection, server_side=True)
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()
            except OSError:
                continue

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def http(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def test_one_connection_serves_many_requests(gateway: FakeGateway) -> None:
    with serving(gateway) as url:
        asked = Gateway([url])
        for step in range(5):
            assert asked.ask("POST", "/v1/report", {"step": step}, token=TOKEN) is None
        connection = asked.connection
        assert asked.ask("POST", "/v1/acknowledgements", {"move": 1}, token=TOKEN) == {"accepted": True}
        assert asked.connection is connection
        asked.close()


def test_a_connection_that_the_gateway_has_closed_meanwhile_is_no_fault(gateway: FakeGateway) -> None:
    with serving(gateway) as url:
        asked = Gateway([url])
        asked.ask("POST", "/v1/report", {}, token=TOKEN)
    with serving(gateway, int(url.rpartition(":")[2])):
        asked.ask("POST", "/v1/report", {}, token=TOKEN)
        asked.close()


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (401, "token-refused", TokenRefused),
        (409, "attempt-over", AttemptOver),
        (409, "superseded", Superseded),
        (404, "not-known-yet", GatewayAway),
        (503, "unavailable", GatewayAway),
        (500, "", GatewayAway),
        (422, "refused", MessageRefused),
        (429, "too-often", TooOften),
        (403, "refused", MessageRefused),
    ],
)
def test_a_refusal_has_its_type_and_the_gateways_words(
    gateway: FakeGateway, status: int, code: str, error: type[Exception]
) -> None:
    gateway.refuse["/v1/report"] = Refusal(status, code, "why\nit is so")
    with serving(gateway) as url, pytest.raises(error, match="why it is so") as raised:
        Gateway([url]).ask("POST", "/v1/report", {}, token=TOKEN)
    assert type(raised.value) is error
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"", "closed connection"),
        (b"SSH-2.0-OpenSSH\r\n", "SSH"),
        (http("200 OK", b"{"), "Expecting"),
        (http("200 OK", b"[" * 60_000), "GatewayAway|recursion|Expecting"),
        (http("200 OK", b" " * 70_000), "at most 65536 bytes"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1000\r\n" + b" " * 4096 + b"\r\n", "."),
        (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000 + b"\r\n", "headers"),
        (http("302 Found", b"", "Location: http://example.org/"), "302"),
    ],
)
def test_an_answer_that_makes_no_sense_is_none(answer: bytes, words: str) -> None:
    asked = Gateway([f"http://127.0.0.1:{serve_raw(answer)}"])
    with pytest.raises((GatewayAway, MessageRefused), match=words):
        asked.ask("GET", "/v1/orders", token=TOKEN)


def test_an_answer_that_never_ends_is_given_up() -> None:
    server = socket.create_server(("127.0.0.1", 0))

    def drip() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            with contextlib.suppress(OSError):
                for _ in range(600):
                    connection.sendall(b" ")
                    time.sleep(0.05)

    threading.Thread(target=drip, daemon=True).start()
    with pytest.raises(GatewayAway, match="in time"):
        Gateway([f"http://127.0.0.1:{server.getsockname()[1]}"]).ask("GET", "/", answer_s=0.3)


def test_another_thread_ends_a_request_that_waits(gateway: FakeGateway) -> None:
    with serving(gateway) as url:
        asked = Gateway([url])
        timer = threading.Thread(target=lambda: [time.sleep(0.005) or asked.interrupt() for _ in range(200)])
        timer.start()
        with pytest.raises(GatewayAway):
            asked.ask("GET", "/v1/orders?seen=0", token=TOKEN, answer_s=60)
        timer.join()


def test_after_a_fault_the_next_address_is_asked(gateway: FakeGateway) -> None:
    with socket.socket() as held, serving(gateway) as url:
        held.bind(("127.0.0.1", 0))
        asked = Gateway([f"http://127.0.0.1:{held.getsockname()[1]}", url])
        with pytest.raises(GatewayAway):
            asked.ask("POST", "/v1/report", {}, token=TOKEN)
        for _ in range(3):
            asked.ask("POST", "/v1/report", {}, token=TOKEN)
        assert len(gateway.reports) == 3
        asked.close()


@pytest.mark.parametrize(
    "address", ["http://192.0.2.1:9851", "http://example.org", "ftp://127.0.0.1", "127.0.0.1:1", ""]
)
def test_without_tls_a_gateway_is_on_this_machine(address: str) -> None:
    with pytest.raises(GatewayAway, match="expected https, or http at a loopback address"):
        Gateway([address]).ask("GET", "/v1/health", token=TOKEN)


def test_no_address_is_no_gateway() -> None:
    with pytest.raises(GatewayAway):
        Gateway([]).ask("GET", "/v1/health")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_port_on_which_another_user_listens_gets_no_token() -> None:
    code = (
        "import os, socket, sys; os.setuid(4242); s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); c, _ = s.accept(); print(len(c.recv(65536)), flush=True)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        with pytest.raises(GatewayAway, match="uid 4242 listens"):
            Gateway([f"http://127.0.0.1:{port}"]).ask("GET", "/v1/orders", token=TOKEN)
        assert process.stdout.readline() == "0\n", "nothing was sent"


def test_the_owner_of_a_listening_socket_is_found_in_every_table(tmp_path: Path) -> None:
    head = (
        "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    )

    def table(name: str, address: str, uid: int, state: str = "0A") -> Path:
        path = tmp_path / name
        path.write_text(
            f"{head}   0: {address}:267B 00000000:0000 {state} 0:0 0:0 0 {uid} 0 1 1 0 100 0 0 10 0\n"
        )
        return path

    mine, mapped = table("v4", "0100007F", os.getuid()), table("v6", "0000000000000000FFFF00000100007F", 4242)
    require_trusted_listener("127.0.0.1", 9851, (mine,))
    require_trusted_listener("127.0.0.1", 9851, (table("system", "00000000", 999),))
    require_trusted_listener("127.0.0.1", 9851, (mine, table("else", "0200007F", 4242)))
    require_trusted_listener("::1", 9851, (table("six", "00000000000000000000000001000000", 0),))
    for tables in (
        (mapped,),
        (mine, mapped),
        (table("any", "0" * 32, 4242),),
        (table("old", "0100007F", 0, "06"),),
    ):
        with pytest.raises(UntrustedListener):
            require_trusted_listener("127.0.0.1", 9851, tables)


@pytest.mark.skipif(os.geteuid() != 0, reason="starts a process of another user")
def test_whoever_listened_before_keeps_no_connection() -> None:
    """Another user takes the connection, and leaves the port to the gateway before the client looks who listens."""
    program = (
        "import os, socket, sys; os.setuid(12345)\n"
        "listener = socket.create_server(('127.0.0.1', 0)); print(listener.getsockname()[1], flush=True)\n"
        "taken = listener.accept(); listener.close(); print('taken', flush=True); sys.stdin.read()\n"
    )
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        where = ("127.0.0.1", int(other.stdout.readline()))
        with socket.create_connection(where) as mine:
            assert other.stdout.readline() == "taken\n"
            with socket.create_server(where):
                require_trusted_listener(*where)
                with pytest.raises(UntrustedListener, match="uid 12345"):
                    require_trusted_listener(*where, client=mine.getsockname())
                with socket.create_connection(where) as genuine:
                    require_trusted_listener(*where, client=genuine.getsockname())
        assert other.stdin is not None
        other.stdin.close()


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("UID_MIN\t\t\t 1000\nUID_MAX 60000\n", 1000),
        ("UID_MIN 500\n", 500),
        ("UID_MIN 1000\n SYS_UID_MAX 499\n", 500),
        ("UID_MIN 500\n#SYS_UID_MAX 999\n", 500),
        ("UID_MIN 500\nSYS_UID_MAX 999\n", 500),
        ("", 1000),
    ],
)
def test_system_accounts_are_those_of_login_defs(text: str, first: int, tmp_path: Path) -> None:
    """Users of many universities have numbers from 500 on."""
    defs, table = tmp_path / "login.defs", tmp_path / "tcp"
    defs.write_text(text)
    assert first_user(defs) == first
    assert first_user(tmp_path / "missing") == 1000
    for uid in (first - 1, first):
        table.write_text(f"head\n 0: 0100007F:267B 00000000:0000 0A 0:0 0:0 0 {uid} 0 1\n")
        with pytest.raises(UntrustedListener) if uid == first else contextlib.nullcontext():
            require_trusted_listener("127.0.0.1", 9851, (table,), defs)


def test_a_certificate_is_verified(own_certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own_certificate)
    port = serve_raw(http("200 OK", b'{"version": "1"}'), context)
    assert Gateway([f"https://localhost:{port}"], str(own_certificate)).ask("GET", "/v1/health") == {
        "version": "1"
    }
    for address, ca in (
        (f"https://localhost:{port}", ""),
        (f"https://127.0.0.1:{port}", str(own_certificate)),
    ):
        with pytest.raises(GatewayAway, match="CERTIFICATE_VERIFY_FAILED"):
            Gateway([address], ca).ask("GET", "/v1/health", token=TOKEN)
    with pytest.raises(GatewayAway):
        Gateway([f"https://localhost:{port}"], "/proc/nowhere.pem").ask("GET", "/v1/health", token=TOKEN)
