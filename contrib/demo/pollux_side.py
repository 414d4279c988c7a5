"""Run polluxd for the demo, and read its database."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from contrib import browser, devcluster
from contrib.devcluster import DevCluster
from contrib.devcluster.polluxd import BIN, idle_notes, lost_gpu_s
from polluxd.cli.table_rows import job_rows
from polluxd.errors import PolluxError
from polluxd.store import Store

from .run import RunFailedError
from .summary import Move, Series

PACE: Mapping[str, Mapping[str, float]] = {
    "slurm": {"lease_s": 120},
    "cycle": {"interval_s": 10, "floor_s": 3, "poll_s": 0.5, "busy_poll_s": 0.25},
    "moves": {"cooldown_s": 15, "default_cost_s": 10},
}


class Polluxd(devcluster.Polluxd):
    """polluxd at a pace at which the demo's trainings can be watched."""

    def __init__(self, cluster: DevCluster, folder: Path) -> None:
        super().__init__(cluster, folder, **PACE)

    @contextlib.contextmanager
    def live_page(self) -> Iterator[str]:
        """Run `polluxctl web` as an administrator; yield its URL."""
        page = subprocess.Popen(
            [str(BIN / "polluxctl"), "web"],
            env=self.env,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
            **self.identity,  # type: ignore[call-overload]
        )
        try:
            yield page.stdout.readline().strip()
        finally:
            page.terminate()
            page.wait()

    def picture_page(self, picture: Path) -> None:
        """Keep a picture of the live page, where there is a Chromium. A page shows itself to one browser alone."""
        if shutil.which(browser.CHROMIUM):
            with contextlib.suppress(subprocess.SubprocessError), self.live_page() as url:
                browser.screenshot(url, picture, height=900)

    def write_moves(self, out: Path) -> None:
        """Keep what `polluxctl moves` says of the run as moves.txt.

        Raises:
            RunFailedError: the command failed; the message has its words.
        """
        done = self.command("polluxctl", "moves")
        if done.returncode:
            raise RunFailedError(f"polluxctl moves failed: {done.stderr.strip()}")
        (out / "moves.txt").write_text(done.stdout)


class Database:
    """What the demo reads from polluxd's database, during and after the run."""

    def __init__(self, cluster: DevCluster) -> None:
        self._url = cluster.database_url
        self._name = cluster.cluster_name
        self._store: Store | None = None
        self._last: dict[int, dict[str, Any]] = {}
        self._reasons: list[tuple[int, str]] = []

    def details(self) -> Mapping[int, Mapping[str, Any]]:
        """Return polluxd's view of each job, by job id.

        While the database does not answer, this is the last known view.
        """
        # The view is only shown: the success of the run depends on what Slurm reports.
        with contextlib.suppress(PolluxError):
            self._last = {row["job_id"]: row for row in job_rows(self._open())}
        return self._last

    def reasons(self) -> Sequence[tuple[int, str]]:
        """Return job id and reason of each move so far; a first placement is no move."""
        with contextlib.suppress(PolluxError):
            self._reasons = [(m.job_id, m.reason) for m in self._open().moves() if m.path != "start"]
        return self._reasons

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def _open(self) -> Store:
        if self._store is None:
            self._store = Store(self._url, self._name)
        return self._store

    def batch_sizes(self) -> dict[int, Series]:
        """Return the total batch size over time, by job id, an entry per change."""
        found: dict[int, Series] = {}
        for point in self._open().report_history():
            series = found.setdefault(point.job_id, [])
            if point.batch_size and (not series or series[-1][1] != point.batch_size):
                series.append((point.at, point.batch_size))
        return found

    def idle_notes(self, since: float) -> list[str]:
        """Return what polluxd's watch said since a POSIX time of GPUs that idled beside a waiting job."""
        return idle_notes(self._open(), since)

    def lost_gpu_s(self) -> float:
        """Return the GPU seconds for which trainings stood because of moves that came to nothing."""
        return lost_gpu_s(self._open().moves())

    def moves(self) -> list[Move]:
        """Return the completed moves in order; a first placement is no move."""
        return [
            Move(
                *(cost["job_id"], cost["path"], cost["from"], cost["to"], cost["planned_at"]),
                # The order to drain starts the clock, and training goes on until its last step. In place it goes on
                # until the ranks form their groups again: no order stops it.
                total_s=cost["drained_s"] + cost["total_s"],
                steps=({} if cost["path"] == "resize" else {"drain": cost["drained_s"]}) | cost["steps"],
            )
            for cost in self._open().move_costs()
        ]

    def noise_scales(self, names: Mapping[int, str]) -> dict[str, float]:
        """Return the median noise scale phi [examples] of each training, by name.

        The median is over all reports of the training's life. Reports from one GPU count only where there are no
        others: one GPU alone estimates the noise scale poorly.
        """
        seen: dict[str, list[tuple[bool, float]]] = {}
        for point in self._open().report_history():
            if point.noise_scale is not None and point.job_id in names:
                seen.setdefault(names[point.job_id], []).append((point.gpus > 1, point.noise_scale))
        return {
            name: median([phi for several, phi in values if several] or [phi for _, phi in values])
            for name, values in seen.items()
        }
