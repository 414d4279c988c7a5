"""Connections between processes of one job.

They accept only authentic messages, and no stranger can delay a process.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from pollux.ranks import sealed
from pollux.ranks.sealed import (
    ClientHandshake,
    Entrance,
    Frames,
    NoAnswer,
    NotAuthentic,
    ServerHandshake,
    connect,
)

KEY = b"the job's key"


def met(client_key: bytes = KEY, server_key: bytes = KEY, purpose: str = "test") -> tuple[Frames, Frames]:
    """Return both sides' frames after a handshake."""
    client, server = ClientHandshake(client_key, "test", b'{"a": 1}'), ServerHandshake(server_key, purpose)
    server.feed(client.feed(server.feed(client.first)))
    assert client.done
    assert server.hello == b'{"a": 1}'
    return client.frames, server.frames


def test_both_sides_understand_each_other() -> None:
    client, server = met()
    for text in (b"one", b"two"):
        server.feed(client.pack(text))
        client.feed(server.pack(text * 2))
    assert [server.take(), server.take(), server.take()] == [b"one", b"two", None]
    assert [client.take(), client.take(), client.take()] == [b"oneone", b"twotwo", None]


@pytest.mark.parametrize(
    ("keys", "purpose"), [((KEY, b"x"), "test"), ((b"x", KEY), "test"), ((KEY, KEY), "y")]
)
def test_another_key_or_purpose_is_refused(keys: tuple[bytes, bytes], purpose: str) -> None:
    with pytest.raises(NotAuthentic):
        met(*keys, purpose)


def test_every_message_is_authenticated() -> None:
    """Any tampering is refused: change, replay, loss, reflection, other peer."""

    def refused(frame: bytes, reader: Frames) -> None:
        reader.feed(frame)
        with pytest.raises(NotAuthentic):
            reader.take()

    client, server = met()
    frame = client.pack(b"give 1")
    refused(frame.replace(b"1\n", b"9\n"), server)
    client, server = met()
    frame = client.pack(b"one")
    server.feed(frame)
    assert server.take() == b"one"
    refused(frame, server)
    client, server = met()
    client.pack(b"one")
    refused(client.pack(b"two"), server)
    client, server = met()
    refused(client.pack(b"one"), client)
    client, _ = met()
    _, server = met()
    refused(client.pack(b"one"), server)
    client, server = met()
    refused(b"one\n", server)


def test_a_stranger_cannot_fill_the_memory() -> None:
    handshake = ServerHandshake(KEY, "test")
    with pytest.raises(NotAuthentic, match="longer than"):
        handshake.feed(b"x" * (sealed.MAX_GREETING + 1))
    client = ClientHandshake(KEY, "test", b"{}")
    with pytest.raises(NotAuthentic, match="longer than"):
        client.feed(b"x" * (sealed.MAX_GREETING + 1))


@contextmanager
def entrance(**limits: Any) -> Iterator[tuple[Entrance, int]]:
    listener = socket.create_server(("127.0.0.1", 0))
    made = Entrance(listener, KEY, "test", **limits)
    try:
        yield made, listener.getsockname()[1]
    finally:
        made.close()


def dial(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port))


def test_idle_and_slow_strangers_delay_nobody() -> None:
    """No process waits for a stranger's handshake.

    The time limit of a handshake is long here, so a process that waited for a stranger would not end.
    """
    with entrance(handshake_s=1000.0) as (door, port):
        strangers = [dial(port) for _ in range(40)]
        for number, stranger in enumerate(strangers):
            stranger.sendall(b'{"nonce": "x' if number % 2 else b"")
        found: list[object] = []
        client = threading.Thread(
            target=lambda: found.append(connect("127.0.0.1", [port], KEY, "test", b"hello"))
        )
        client.start()
        admitted: list[tuple[socket.socket, Frames, bytes]] = []
        while not admitted:
            admitted += door.admitted(1.0)
        client.join()
        assert [hello for _, _, hello in admitted] == [b"hello"]
        assert len(found) == 1
        for stranger in strangers:
            stranger.close()


def test_a_flood_displaces_its_own_connections() -> None:
    with entrance(max_pending=8, handshake_s=1000.0) as (door, port), socket.socket() as honest:
        honest.bind(("127.0.0.2", 0))
        honest.connect(("127.0.0.1", port))
        flood = []
        for _ in range(30):
            flood.append(dial(port))
            door.admitted(0.1)
        handshake = ClientHandshake(KEY, "test", b"hello")
        honest.sendall(handshake.first)
        admitted: list[object] = []
        while not admitted:
            admitted += door.admitted(0.1)
            if not handshake.done:
                honest.sendall(handshake.feed(honest.recv(4096)))
        for each in flood:
            each.close()


def test_a_silent_connection_is_dropped_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(sealed, "time", SimpleNamespace(monotonic=lambda: now))
    with entrance(handshake_s=10.0) as (door, port), dial(port) as stranger:
        stranger.sendall(b"{")
        while not door.waiting:
            door.admitted(1.0)
        now += 10.0
        door.admitted(0.01)
        assert door.waiting
        now += 0.1
        door.admitted(0.01)
        assert not door.waiting
        stranger.settimeout(10)
        assert stranger.recv(1) == b""


def test_listeners_of_others_are_passed_over() -> None:
    with entrance() as (door, port), socket.create_server(("127.0.0.1", 0)) as silent:
        reflecting = socket.create_server(("127.0.0.1", 0))

        def reflect() -> None:
            connection, _ = reflecting.accept()
            with connection:
                while data := connection.recv(4096):
                    connection.sendall(data)

        mirror = threading.Thread(target=reflect)
        mirror.start()
        ports = [silent.getsockname()[1], reflecting.getsockname()[1], port]
        made: list[tuple[socket.socket, Frames]] = []
        client = threading.Thread(
            target=lambda: made.append(connect("127.0.0.1", ports, KEY, "test", b"hello"))
        )
        client.start()
        while not door.admitted(0.1):
            pass
        client.join()
        assert made[0][0].getpeername()[1] == port
        mirror.join()
        reflecting.close()


def test_why_nobody_answers_is_told() -> None:
    held = socket.socket()
    held.bind(("127.0.0.1", 0))  # so that nobody listens there
    free = held.getsockname()[1]
    with pytest.raises(NoAnswer, match="refused") as nobody:
        connect("127.0.0.1", [free], KEY, "test", b"")
    assert nobody.value.refused
    with held, entrance() as (door, port):
        client_ended = threading.Event()

        def serve() -> None:
            while not client_ended.is_set():
                door.admitted(0.05)

        serving = threading.Thread(target=serve)
        serving.start()
        with pytest.raises(NoAnswer, match="not this job's") as stranger:
            connect("127.0.0.1", [free, port], b"another key", "test", b"")
        client_ended.set()
        serving.join()
        assert not stranger.value.refused
    with socket.create_server(("127.0.0.1", 0)) as silent:
        started = time.monotonic()
        with pytest.raises(NoAnswer, match="did not answer"):
            connect("127.0.0.1", [silent.getsockname()[1]], KEY, "test", b"", timeout=0.1)
        assert time.monotonic() > started
