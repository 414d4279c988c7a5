"""Connections between processes of one job.

They accept only authentic messages, and no stranger can delay a process.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

import pytest

from pollux.ranks import links
from pollux.ranks.links import Door, Link, NoAnswer, NotAuthentic, connect

KEY = b"the job's key"
PATIENCE_S = 60.0


class Wire:
    """A client and a server in their handshake, with somebody between them who sees each message."""

    def __init__(self, client_key: bytes = KEY, server_key: bytes = KEY, purpose: str = "test") -> None:
        ends = [*socket.socketpair(), *socket.socketpair()]
        self.client, self.server = Link(ends[0]), Link(ends[3])
        self.near, self.far = (Connection(end.detach()) for end in ends[1:3])
        self.errors: list[OSError] = []
        self.hello = b""

        def greet() -> None:
            try:
                self.client.greet(client_key, "test", b"hello", PATIENCE_S)
            except OSError as error:
                self.errors.append(error)
                self.client.close()

        def welcome() -> None:
            try:
                self.hello = self.server.welcome(server_key, purpose)
            except OSError as error:
                self.errors.append(error)
                self.server.close()

        threads = [threading.Thread(target=each) for each in (greet, welcome)]
        for thread in threads:
            thread.start()
        try:
            for source, target in ((self.near, self.far), (self.far, self.near), (self.far, self.near)):
                target.send_bytes(source.recv_bytes())
            self.far.send_bytes(self.near.recv_bytes())
        except (OSError, EOFError):
            self.near.close()
            self.far.close()
        for thread in threads:
            thread.join()

    def sent(self, text: bytes) -> bytes:
        """What the client's message is on its way."""
        self.client.send(text)
        return self.near.recv_bytes()


def test_both_sides_understand_each_other() -> None:
    wire = Wire()
    assert wire.hello == b"hello"
    for text in (b"one", b""):
        wire.far.send_bytes(wire.sent(text))
        assert wire.server.receive(PATIENCE_S) == text
        wire.server.send(text * 2)
        wire.near.send_bytes(wire.far.recv_bytes())
        assert wire.client.receive(PATIENCE_S) == text * 2
    with pytest.raises(TimeoutError):
        wire.client.receive(0.0)
    wire.client.close()
    wire.near.close()
    wire.far.close()
    with pytest.raises(ConnectionResetError):
        wire.server.receive(PATIENCE_S)


@pytest.mark.parametrize(
    ("keys", "purpose"), [((KEY, b"x"), "test"), ((b"x", KEY), "test"), ((KEY, KEY), "y")]
)
def test_another_key_or_purpose_is_refused(keys: tuple[bytes, bytes], purpose: str) -> None:
    wire = Wire(*keys, purpose)
    assert any(isinstance(error, NotAuthentic) for error in wire.errors)
    assert not wire.hello


def test_every_message_is_authenticated() -> None:
    """Any tampering is refused: change, replay, loss, reflection, other peer."""

    def refused(message: bytes, to: Connection, reader: Link) -> None:
        to.send_bytes(message)
        with pytest.raises(NotAuthentic):
            reader.receive(PATIENCE_S)

    wire = Wire()
    refused(wire.sent(b"give 1")[:-1] + b"9", wire.far, wire.server)
    wire = Wire()
    message = wire.sent(b"one")
    wire.far.send_bytes(message)
    assert wire.server.receive(PATIENCE_S) == b"one"
    refused(message, wire.far, wire.server)
    wire = Wire()
    wire.sent(b"one")
    refused(wire.sent(b"two"), wire.far, wire.server)
    wire = Wire()
    refused(wire.sent(b"one"), wire.near, wire.client)
    wire, other = Wire(), Wire()
    refused(wire.sent(b"one"), other.far, other.server)
    wire = Wire()
    refused(b"one", wire.far, wire.server)


def test_a_stranger_cannot_fill_the_memory() -> None:
    ours, theirs = socket.socketpair()
    stranger = Connection(theirs.detach())
    stranger.send_bytes(b"x" * (links.MAX_GREETING + 1))
    with pytest.raises(OSError):  # noqa: PT011 - Python's own words
        Link(ours).welcome(KEY, "test")
    stranger.close()


@contextmanager
def door(**limits: Any) -> Iterator[tuple[queue.SimpleQueue[bytes], int]]:
    """Admitted connections' hellos, and the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    admitted: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    made = Door(listener, KEY, "test", lambda link, hello: admitted.put(hello), **limits)
    try:
        yield admitted, listener.getsockname()[1]
    finally:
        made.close()


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def test_idle_and_slow_strangers_delay_nobody() -> None:
    """A door that read them one after the other would not come to the honest client."""
    with door(handshake_s=1000.0) as (admitted, port):
        strangers = [dial(port) for _ in range(40)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(b"\0" if number % 2 else b"")
        connect("127.0.0.1", [port], KEY, "test", b"hello", PATIENCE_S).close()
        assert admitted.get(timeout=PATIENCE_S) == b"hello"
        for stranger in strangers:
            stranger.close()


def test_a_flood_displaces_its_own_connections() -> None:
    with door(max_pending=8, handshake_s=1000.0) as (admitted, port), socket.socket() as honest:
        honest.bind(("127.0.0.2", 0))
        honest.connect(("127.0.0.1", port))
        flood = [dial(port) for _ in range(30)]
        for each in flood[:-8]:
            each.settimeout(PATIENCE_S)
            assert each.recv(1) == b""
        link = Link(honest)
        link.greet(KEY, "test", b"hello", PATIENCE_S)
        assert admitted.get(timeout=PATIENCE_S) == b"hello"
        link.close()
        for each in flood:
            each.close()


def test_a_silent_connection_is_dropped_in_time() -> None:
    with door(handshake_s=0.1) as (admitted, port), dial(port) as stranger:
        stranger.sendall(b"\0")
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1) == b""
        assert admitted.empty()


def test_a_door_closes_though_strangers_are_in_their_handshake() -> None:
    with door(handshake_s=1000.0) as (_, port):
        stranger = dial(port)
    stranger.settimeout(PATIENCE_S)
    with suppress(ConnectionResetError):
        assert stranger.recv(1) == b""
    stranger.close()
    assert not [each for each in threading.enumerate() if each.name in ("pollux-door", "pollux-link")]


def test_listeners_of_others_are_passed_over() -> None:
    with door() as (admitted, port), socket.create_server(("127.0.0.1", 0)) as silent:
        reflecting = socket.create_server(("127.0.0.1", 0))

        def reflect() -> None:
            connection, _ = reflecting.accept()
            with connection, suppress(OSError):
                while data := connection.recv(4096):
                    connection.sendall(data)

        mirror = threading.Thread(target=reflect)
        mirror.start()
        ports = [silent.getsockname()[1], reflecting.getsockname()[1], port]
        connect("127.0.0.1", ports, KEY, "test", b"hello", 2.0).close()
        assert admitted.get(timeout=PATIENCE_S) == b"hello"
        mirror.join()
        reflecting.close()


def test_why_nobody_answers_is_told() -> None:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))  # so that nobody listens there
    free = held.getsockname()[1]
    with pytest.raises(NoAnswer, match="refused") as nobody:
        connect("127.0.0.1", [free], KEY, "test", b"")
    assert nobody.value.refused
    with held, door() as (_, port), pytest.raises(NoAnswer, match="not this job's") as stranger:
        connect("127.0.0.1", [free, port], b"another key", "test", b"")
    assert not stranger.value.refused
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pytest.raises(NoAnswer, match=r"no message came within 0.1 s"),
    ):
        connect("127.0.0.1", [silent.getsockname()[1]], KEY, "test", b"", timeout=0.1)


def test_connections_without_end_are_taken_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each costs the process that trains more than whoever makes it."""
    waits: list[float] = []
    monkeypatch.setattr(links, "ARRIVALS", (0.001, 5.0))
    monkeypatch.setattr(links.time, "sleep", waits.append)
    with door() as (admitted, port):
        for number in range(10):
            connect("127.0.0.1", [port], KEY, "test", b"%d" % number).close()
            admitted.get(timeout=PATIENCE_S)
    assert len(waits) >= 4
    assert sum(waits) > 1000
