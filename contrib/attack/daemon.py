"""Run polluxd in a separate process, also with a defence removed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from contrib.devcluster import DevCluster, write_configuration

_MAIN = "\nfrom polluxd.cli.daemon import main\nmain()\n"
_CTL = "\nfrom polluxd.cli.ctl import main\nmain()\n"


class Polluxd:
    """polluxd on a private cluster.

    Args:
        folder: of its configuration and log.
        interval_s: between two decisions.
    """

    def __init__(self, cluster: DevCluster, folder: Path, interval_s: float) -> None:
        self.interval_s = interval_s
        self.config = folder / "polluxd.toml"
        self.log = folder / "polluxd.log"
        self._environment = {**os.environ, **cluster.client_environment, "POLLUXD_CONFIG": str(self.config)}
        self._process: subprocess.Popen[bytes] | None = None
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

    def start(self, patch: str = "") -> None:
        """Start polluxd.

        Args:
            patch: Python that runs before polluxd's own, and takes a defence away.
        """
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-c", patch + _MAIN, "run", "--config", str(self.config)],
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
        """Run polluxd with a defence removed, and as it is afterwards."""
        self.stop()
        self.start(patch)
        try:
            yield
        finally:
            self.stop()
            self.start()
