"""Run polluxd and its gateway, also with a defence removed."""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

from contrib.devcluster import DevCluster, write_configuration

_MAIN = "\nfrom polluxd.cli.daemon import main\nmain()\n"
_CTL = "\nfrom polluxd.cli.ctl import main\nmain()\n"


class _Service:
    """A command of polluxd that runs until it is stopped.

    Args:
        words: of the command.
    """

    def __init__(self, words: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._words, self._environment = words, environment
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, patch: str = "") -> None:
        """Start the service.

        Args:
            patch: Python that runs before polluxd's own, and takes a defence away.
        """
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-c", patch + _MAIN, *self._words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                cwd="/",
            )

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
            self._process = None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @contextmanager
    def patched(self, patch: str) -> Iterator[None]:
        """Run the service with a defence removed, and as it is afterwards."""
        self.stop()
        self.start(patch)
        try:
            yield
        finally:
            self.stop()
            self.start()


class Polluxd(_Service):
    """polluxd on a private cluster.

    Args:
        folder: of its configuration and log.
        interval_s: between two decisions.
    """

    def __init__(self, cluster: DevCluster, folder: Path, interval_s: float) -> None:
        self.interval_s = interval_s
        self.config = folder / "polluxd.toml"
        environment = {**os.environ, **cluster.client_environment, "POLLUXD_CONFIG": str(self.config)}
        super().__init__(["run", "--config", str(self.config)], environment, folder / "polluxd.log")
        write_configuration(
            cluster,
            self.config,
            slurm={"timeout_s": 5, "lease_s": 60},
            cycle={
                "interval_s": interval_s,
                "floor_s": 1,
                "poll_s": 1,
                "busy_poll_s": 0.3,
                "leader_lease_s": 8,
            },
            moves={
                "cooldown_s": 1,
                "default_cost_s": 5,
                "drain_timeout_s": 60,
                "training_timeout_s": 150,
            },
        )
        migrated = self.command("polluxd", "migrate")
        if migrated.returncode:
            raise RuntimeError(f"polluxd migrate: {migrated.stderr}")

    def command(self, *words: str, columns: int = 200) -> subprocess.CompletedProcess[str]:
        """Run polluxd or polluxctl with this configuration."""
        return subprocess.run(
            [sys.executable, "-c", _CTL if words[0] == "polluxctl" else _MAIN, *words[1:]],
            env={**self._environment, "NO_COLOR": "1", "COLUMNS": str(columns)},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )

    def ctl(self, patch: str, *words: str) -> str:
        """Return what polluxctl prints, with a defence removed by `patch`."""
        done = subprocess.run(
            [sys.executable, "-c", patch + _CTL, *words],
            env={**self._environment, "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            stdin=subprocess.DEVNULL,
        )
        return done.stdout

    def on_terminal(self, patch: str, terminal: int, *words: str) -> subprocess.Popen[bytes]:
        """Start polluxctl on a terminal, with a defence removed by `patch`."""
        return subprocess.Popen(
            [sys.executable, "-c", patch + _CTL, *words],
            env={**self._environment, "TERM": "xterm", "COLUMNS": "200", "LINES": "40"},
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
        )


class GatewayService(_Service):
    """The gateway of a private cluster, in the place of the cluster's own one."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        cluster.gateways.stop()
        (self.url,) = cluster.gateways.addresses
        self.config = cluster.directory / "polluxd" / "gateway-0.toml"
        environment = {**os.environ, **cluster.client_environment}
        super().__init__(["gateway", "--config", str(self.config)], environment, folder / "gateway.log")

    def start(self, patch: str = "") -> None:
        """Start the gateway; return when it answers.

        Floods come from other machines: here they take no CPU from it.
        """
        super().start(patch)
        assert self._process is not None
        for thread in os.listdir(f"/proc/{self._process.pid}/task"):
            os.setpriority(os.PRIO_PROCESS, int(thread), -15)
        deadline = time.monotonic() + 60.0
        while not self._answers():
            if time.monotonic() > deadline or not self.runs:
                raise RuntimeError(f"the gateway does not answer: {self.log.read_text()[-500:]}")
            time.sleep(0.1)

    def memory_mb(self) -> int:
        """Return the largest memory that the process has had. proc(5)."""
        assert self._process is not None
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

    def _answers(self) -> bool:
        asked = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        with suppress(OSError, http.client.HTTPException):
            asked.request("GET", "/v1/health")
            return asked.getresponse().status == 200
        return False
