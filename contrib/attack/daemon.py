"""Run polluxd and its gateway."""

from __future__ import annotations

import http.client
import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from contrib import devcluster
from contrib.devcluster import DevCluster
from contrib.devcluster.polluxd import BIN
from contrib.devcluster.processes import Daemon

POLLUXCTL = str(BIN / "polluxctl")


class Polluxd(devcluster.Polluxd):
    """polluxd on a private cluster.

    Args:
        folder: of its configuration and log.
        interval_s: between two decisions.
    """

    def __init__(self, cluster: DevCluster, folder: Path, interval_s: float) -> None:
        self.interval_s = interval_s
        super().__init__(
            cluster,
            folder,
            cycle={"interval_s": interval_s, "poll_s": 1},
            moves={"cooldown_s": 1, "training_timeout_s": 150},
        )

    def ctl(self, *words: str) -> str:
        """Return what polluxctl prints."""
        done = subprocess.run(
            [POLLUXCTL, *words],
            env={**self.env, "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def on_terminal(self, terminal: int, *words: str) -> subprocess.Popen[bytes]:
        """Start polluxctl on a terminal."""
        environment = {name: value for name, value in self.env.items() if name != "NO_COLOR"}
        return subprocess.Popen(
            [POLLUXCTL, *words],
            env={**environment, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )


class GatewayService(Daemon):
    """The gateway of a private cluster, in the place of the cluster's own one."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        cluster.gateways.stop()
        (self.url,) = cluster.gateways.addresses
        self.config = cluster.directory / "polluxd" / "gateway-0.toml"
        words = [str(BIN / "polluxd"), "gateway", "--config", str(self.config)]
        super().__init__("gateway", words, folder / "gateway.log", env=cluster.client_environment)

    def start(self) -> None:
        """Start the gateway; return when it answers.

        Floods come from other machines: here they take no CPU from it.
        """
        super().start()
        for thread in os.listdir(f"/proc/{self.pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -15)
        deadline = time.monotonic() + 60.0
        while not self._answers():
            if time.monotonic() > deadline or not self.running:
                raise RuntimeError(f"the gateway does not answer: {self.log.read_text()[-500:]}")
            time.sleep(0.1)

    def restart(self) -> None:
        """Start the gateway again: it then remembers no token."""
        self.stop()
        self.start()

    def memory_mb(self) -> int:
        """Return the largest memory that the process has had. proc(5)."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

    def _answers(self) -> bool:
        asked = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            asked.request("GET", "/v1/health")
            return asked.getresponse().status == 200
        return False
