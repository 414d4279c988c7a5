"""What a user's honest process does.

The first line that a server prints names its port.
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time

from contrib.attack.hands import run
from pollux.launcher import meeting as launchers_meeting
from pollux.launcher.messages import Hello
from pollux.ranks.rank_store import RemoteStore, Server


def tell(text: object) -> None:
    print(text, flush=True)


def memory_mb(kind: str) -> int:
    """Return this process's memory, of one of the kinds of proc(5)."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(kind)) // 1024


def store(key: str) -> dict[str, int]:
    """Serve the store of rank 0's process until SIGTERM; return what became of it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # before the server's threads
    server = Server(key.encode())
    tell(server.port)
    before = memory_mb("VmRSS")
    signal.sigwait({signal.SIGTERM})
    return {"grown_mb": memory_mb("VmHWM") - before, "counted": server.values.add("counted", 0)}


def add(port: int, key: str) -> int:
    return RemoteStore("127.0.0.1", port, key.encode()).add("counted", 1)


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


if __name__ == "__main__":
    run(store, launchers, add)
