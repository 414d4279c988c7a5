"""What a user's honest process does, with or without a defence.

python -m contrib.attack.hands.victim WHAT SECONDS [MORE]

    meeting    meet another rank through a torch TCPStore, with pickled values, as an earlier version did
    store      serve the store of rank 0's process; MORE is its key, with "!endless" or "!constant" appended without
               the limit of a greeting or with constant nonces; print the port, then what became of it
    launchers  let two launchers meet on the ports in MORE (JSON), and print how long it took
    one-by-one the same with connections that prove themselves one after the other, as in an earlier version
    add        connect to the store at MORE (JSON: port, key), and count up once

Each prints lines of text; the first names the port, if there is one.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import secrets
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from pollux.launcher import meeting as launchers_meeting
from pollux.launcher.messages import Hello
from pollux.ranks import links
from pollux.ranks.rank_store import RemoteStore, Server


def tell(text: object) -> None:
    print(text, flush=True)


def meeting(seconds: float) -> None:
    import torch.distributed as dist  # noqa: PLC0415 - the others need no torch

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
    )
    tell(store.port)
    secret = secrets.token_hex(32)
    store.set(f"{secret}/ready/0", pickle.dumps("rank 0 is here"))
    deadline = time.monotonic() + seconds
    value: Any = "rank 0 is here"
    while value == "rank 0 is here" and time.monotonic() < deadline:
        value = pickle.loads(store.get(f"{secret}/ready/0"))
        time.sleep(0.05)
    tell(f"read {value}")


def memory_mb(kind: str) -> int:
    """Return this process's memory, of one of the kinds of proc(5)."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind)) // 1024


def store(seconds: float, key: str) -> None:
    key, _, without = key.partition("!")
    if without == "endless":
        links.MAX_GREETING = 1 << 31
    if without == "constant":
        links.secrets = type("Constant", (), {"token_bytes": staticmethod(bytes)})  # type: ignore[assignment, attr-defined]
    server = Server(key.encode())
    tell(server.port)
    before = memory_mb("VmRSS")
    time.sleep(seconds)
    tell(json.dumps({"grown_mb": memory_mb("VmHWM") - before, "counted": server.values.add("counted", 0)}))


def add(port: int, key: str) -> None:
    tell(RemoteStore("127.0.0.1", port, key.encode()).add("counted", 1))


class OneByOne(links.Door):
    """Read each connection to the end of its handshake before the next."""

    def _listen(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                link = links.Link(self._listener.accept()[0])
                timer = threading.Timer(links.HANDSHAKE_S, link.end)
                timer.start()
                try:
                    hello = link.welcome(self._key, self._purpose)
                finally:
                    timer.cancel()
                threading.Thread(target=self._admit, args=(link, hello), daemon=True).start()


def launchers(seconds: float, ports: list[int]) -> None:
    """Node 0 waits for node 1, which comes two seconds after the listener."""
    key = secrets.token_bytes(32)
    try:
        listener = launchers_meeting.listen(ports or launchers_meeting.candidate_ports(key))
    except Exception as error:
        tell(f"failed: {error}")
        return
    tell(listener.getsockname()[1])
    taken = [listener.getsockname()[1]]

    hello = Hello(1, 1, "n1")

    def come() -> None:
        time.sleep(2.0)
        with contextlib.suppress(Exception):
            launchers_meeting.join("127.0.0.1", taken, key, hello, timeout=seconds)

    threading.Thread(target=come, daemon=True).start()
    began = time.monotonic()
    try:
        launchers_meeting.gather(listener, key, 2, timeout=seconds)
        tell(f"met after {time.monotonic() - began:.1f} s")
    except Exception as error:
        tell(f"failed: {error}")


def main() -> None:
    what, seconds = sys.argv[1], float(sys.argv[2])
    more = sys.argv[3] if len(sys.argv) > 3 else ""
    match what:
        case "meeting":
            meeting(seconds)
        case "store":
            store(seconds, more)
        case "one-by-one":
            launchers_meeting.Door = OneByOne  # type: ignore[misc, attr-defined]
            launchers(seconds, json.loads(more))
        case "launchers":
            launchers(seconds, json.loads(more))
        case "add":
            add(*json.loads(more))


if __name__ == "__main__":
    main()
