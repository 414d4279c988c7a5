"""The gateways of a private cluster: one process each."""

from __future__ import annotations

import json
import os
import pwd
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from pollux.scheduler.gateway import Gateway, GatewayError

from .postgres import DevPostgres
from .processes import Daemon, wait_until
from .slurmconf import Layout


class Gateways:
    """Starts and stops the gateways of one cluster.

    Args:
        ports: on loopback, one for each gateway.
        user: polluxd's account, which runs them.
        publish_interval_s: time between two reports of a job [s].
    """

    def __init__(
        self, layout: Layout, ports: list[int], user: pwd.struct_passwd, *, publish_interval_s: float
    ) -> None:
        self._layout, self._user, self._publish_interval_s = layout, user, publish_interval_s
        self.addresses = tuple(f"http://127.0.0.1:{port}" for port in ports)
        self._running: dict[int, Daemon] = {}

    def settings(self, number: int = 0) -> Mapping[str, object]:
        """Return the section `gateway` of polluxd.toml."""
        return {
            "listen": self.addresses[number].removeprefix("http://"),
            "addresses": list(self.addresses),
            "publish_interval_s": self._publish_interval_s,
            "passfile": str(self._folder / "gateway.pgpass"),
        }

    def start_all(self, postgres: DevPostgres, environment: Mapping[str, str]) -> None:
        """Start all gateways; return when they answer.

        The database may be empty yet.
        """
        self._postgres, self._environment = postgres, environment
        self._write(self._folder / "gateway.pgpass", postgres.gateway_passfile.read_text())
        for number in range(len(self.addresses)):
            self.start(number)

    def start(self, number: int = 0) -> None:
        """Start a gateway; return when it answers."""
        sections: Mapping[str, Mapping[str, object]] = {
            "database": {"url": self._postgres.url},
            "slurm": {"cluster": self._layout.cluster_name, "conf": str(self._layout.etc / "slurm.conf")},
            "gateway": self.settings(number),
        }
        lines = []
        for name, entries in sections.items():
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]
        config = self._folder / f"gateway-{number}.toml"
        self._write(config, "\n".join(lines) + "\n")
        program = Path(sys.executable).parent / "polluxd"
        daemon = Daemon(
            f"gateway {number}",
            [str(program), "gateway", "--config", str(config)],
            self._layout.logs / f"gateway-{number}.log",
            env=self._environment,
            user=self._user.pw_name if self._user.pw_uid else None,
        )
        daemon.start()
        self._running[number] = daemon
        wait_until(lambda: self._answers(number), 90, f"{daemon.name}; its log is {daemon.log}")

    def pid(self, number: int = 0) -> int | None:
        return self._running[number].pid

    def stop(self, number: int = 0, *, kill: bool = False) -> None:
        """Stop a gateway with TERM, or with KILL, which is a crash."""
        self._running.pop(number).stop(signal.SIGKILL if kill else signal.SIGTERM)

    def stop_all(self) -> None:
        for number in list(self._running):
            self.stop(number)

    @property
    def _folder(self) -> Path:
        return self._layout.directory / "polluxd"

    def _write(self, path: Path, text: str) -> None:
        """Write a file that only polluxd's account can read."""
        path.touch()
        path.chmod(0o600)
        path.write_text(text)
        os.chown(path, self._user.pw_uid, self._user.pw_gid)

    def _answers(self, number: int) -> bool:
        self._running[number].must_run()
        asked = Gateway([self.addresses[number]])
        try:
            return isinstance(asked.ask("GET", "/v1/health"), dict)
        except GatewayError:
            return False
        finally:
            asked.close()
