"""polluxd as a process that is killed, stopped and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from contrib.devcluster import DevCluster, write_configuration

PACE: Mapping[str, Mapping[str, float]] = {
    "slurm": {"timeout_s": 3, "lease_s": 60},
    "cycle": {"interval_s": 10, "floor_s": 2, "poll_s": 0.5, "busy_poll_s": 0.25, "leader_lease_s": 5},
    "moves": {"cooldown_s": 10, "default_cost_s": 5},
}


class Polluxd:
    """One of several polluxd on a cluster; they share a configuration file."""

    def __init__(self, cluster: DevCluster, folder: Path, name: str) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._config = folder / "polluxd.toml"
        self._env = cluster.client_environment
        self._process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        write_configuration(cluster, self._config, **PACE, policy={"start_gpus": 1})  # more moves

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def migrate(self) -> None:
        """Migrate the schema; raise CalledProcessError where that fails."""
        subprocess.run(self._command("migrate"), env=self._env, check=True, capture_output=True)

    def start(self) -> None:
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command("run"),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,
            )
        self.stopped = False

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop_clock(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
        self.stopped = False

    def end(self) -> None:
        """End polluxd with TERM, or with KILL if it still runs after 20 s."""
        if self.running and self._process is not None:
            self.go_on()
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def _command(self, word: str) -> list[str]:
        return [str(Path(sys.executable).parent / "polluxd"), word, "--config", str(self._config)]
