"""polluxd as the demo runs it, and what the demo reads back out of its database."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg2
from pollux.goodput import NoiseScale
from polluxd.cli.view import job_rows
from polluxd.errors import PolluxError
from polluxd.store import Store

from contrib.devcluster import DevCluster

from .run import RunFailed, stop_child, tail
from .summary import Move, Series
from .workload import Workload

CONFIG = """\
# polluxd as `make demo` runs it: everything quicker than on a real cluster, where the defaults are meant.
mode = "enforce"

[database]
url = {url}

[slurm]
cluster = {cluster}
conf = {conf}
lease_s = 120
heartbeat_file = {heartbeat}

[cycle]
interval_s = 10
floor_s = 3
poll_s = 0.5
busy_poll_s = 0.25

[realloc]
cooldown_s = 15
default_cost_s = 10
"""


class Polluxd:
    """`polluxd migrate`, then `polluxd run` as a child process."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        self.config = folder / "polluxd.toml"
        self.log = folder / "polluxd.log"
        self._env = cluster.client_environment
        self._cluster = cluster
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self, *words: str) -> list[str]:
        return [str(Path(sys.executable).parent / "polluxd"), *words, "--config", str(self.config)]

    def start(self) -> None:
        """Write the configuration, bring the schema up to date, start. Raises RunFailed with what was said."""
        cluster = self._cluster
        self.config.write_text(
            CONFIG.format(
                url=json.dumps(cluster.database_url),
                cluster=json.dumps(cluster.cluster_name),
                conf=json.dumps(str(cluster.slurm_conf)),
                heartbeat=json.dumps(str(cluster.heartbeat_file)),
            )
        )
        self.config.chmod(0o600)  # it holds the database's password
        done = subprocess.run(self._command("migrate"), env=self._env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RunFailed(f"polluxd migrate failed: {(done.stderr or done.stdout).strip()}")
        with self.log.open("ab") as sink:
            self._process = subprocess.Popen(
                self._command("run"),
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle, in order
            )

    def must_run(self) -> None:
        """Raises RunFailed when polluxd has ended."""
        if self._process is None or self._process.poll() is not None:
            status = self._process.poll() if self._process else None
            raise RunFailed(f"polluxd ended by itself (exit status {status}); its log ends with:\n{tail(self.log)}")

    def stop(self) -> None:
        if self._process is not None:
            stop_child(self._process)
            self._process = None


class Database:
    """What the demo reads out of polluxd's database, while it runs and at its end."""

    def __init__(self, cluster: DevCluster) -> None:
        self._url = cluster.database_url
        self._name = cluster.cluster_name
        self._store: Store | None = None
        self._last: dict[int, dict[str, Any]] = {}

    def details(self) -> Mapping[int, Mapping[str, Any]]:
        """polluxd's view of each job; the last known one while the database does not answer."""
        try:
            if self._store is None:
                self._store = Store(self._url, self._name)
            self._last = {row["job_id"]: row for row in job_rows(self._store)}
        except PolluxError:
            pass  # the view is a courtesy: the run itself is judged by Slurm's word
        return self._last

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _query(self, sql: str) -> list[tuple[Any, ...]]:
        connection = psycopg2.connect(self._url.replace("postgresql+psycopg2://", "postgresql://"))
        try:
            with connection.cursor() as cursor:
                cursor.execute(sql, {"cluster": self._name})
                return cursor.fetchall()
        finally:
            connection.close()

    def batch_sizes(self) -> dict[int, Series]:
        """Total batch size over time, by job id, one entry per change."""
        found: dict[int, Series] = {}
        for job_id, at, batch_size in self._query(
            """SELECT job_id, (payload->>'at')::float8, (payload->>'batch_size')::int FROM pollux.report_history
               WHERE cluster = %(cluster)s ORDER BY job_id, 2"""
        ):
            series = found.setdefault(job_id, [])
            if batch_size and (not series or series[-1][1] != batch_size):
                series.append((at, batch_size))
        return found

    def moves(self) -> list[Move]:
        """Re-allocations that completed, in order; first placements are none."""
        found = []
        for job_id, attempt, path, source, target, times in self._query(
            """SELECT job_id, attempt, path, source, target, times FROM pollux.reallocation
               WHERE cluster = %(cluster)s ORDER BY id"""
        ):
            if path == "start" and attempt == 0:
                continue
            move = Move.from_times(job_id, path, source, target, times)
            if move is not None:
                found.append(move)
        return found

    def noise_scales(self, work: Workload, names: Mapping[int, str]) -> dict[str, NoiseScale]:
        """Mean gradient statistics that each training reported over its life, by its name."""
        rows = self._query(
            """SELECT job_id, avg((payload->'noise'->>'sqr')::float8), avg((payload->'noise'->>'var')::float8)
               FROM pollux.report_history
               WHERE cluster = %(cluster)s AND payload->'noise' ? 'sqr' GROUP BY job_id"""
        )
        known = {t.name for t in work.trainings}
        return {names[j]: NoiseScale(sqr, var) for j, sqr, var in rows if names.get(j) in known}
