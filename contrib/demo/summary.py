"""Turn a recording into `summary.json` and the demo's closing tables.

The JSON is a contract; see `Summary.document`. A summary is complete only if every job completed with an
accuracy, GPUs over time and batch sizes over time: `faults` says what is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.table import Table

from .measure import Recording, Track

Series = list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class Move:
    """A completed move: its path and the time that it took.

    The time counts from the order to drain to the first step after the move.
    """

    job_id: int
    path: str
    source: str
    """Placement as text: `n1:4,n2:4`, or `none`."""
    target: str
    at: float
    """When it was planned [POSIX s]."""
    total_s: float
    steps: Mapping[str, float]
    """Seconds by part, in the order of events; they add up to `total_s`."""


@dataclass(slots=True)
class Summary:
    """One run, ready to be printed, drawn and written."""

    recording: Recording
    capacity: int
    """GPUs of the cluster."""
    accuracy: Mapping[str, float]
    """Final accuracy on the held-out part, by job name."""
    batch_size: Mapping[int, Series]
    """Total batch size M over time, by job id; times are POSIX."""
    moves: Sequence[Move] = field(default_factory=list)
    noise_scale: Mapping[str, float] = field(default_factory=dict)
    """Median gradient noise scale [examples], by job name."""
    lost_gpu_s: float = 0.0
    """For which trainings stood because of moves that came to nothing."""

    def _since_start(self, series: Sequence[tuple[float, int]]) -> list[list[float]]:
        zero = self.recording.started_at
        return [[round(max(at - zero, 0.0), 1), value] for at, value in series]

    def moves_of(self, job_id: int) -> list[Move]:
        return [m for m in self.moves if m.job_id == job_id]

    def _job(self, track: Track) -> dict[str, Any]:
        return {
            "name": track.name,
            "job_id": track.job_id,
            "state": track.state,
            "jct_s": None if track.jct_s is None else round(track.jct_s, 1),
            "accuracy": self.accuracy.get(track.name),
            "moves": len(self.moves_of(track.job_id)),
            "gpus": self._since_start(track.gpus),
            "batch_size": self._since_start(self.batch_size.get(track.job_id, [])),
        }

    def document(self) -> dict[str, Any]:
        """Return `{jobs: [...], moves: [...], mean_jct_s, idle_gpu_s, lost_gpu_s}`.

        Times are seconds since the run began.
        """
        mean_jct, idle = self.recording.mean_jct_s, self.idle_gpu_s
        return {
            "jobs": [self._job(t) for t in self.recording.tracks.values()],
            "moves": [
                {
                    "job_id": m.job_id,
                    "path": m.path,
                    "from": m.source,
                    "to": m.target,
                    "total_s": round(m.total_s, 3),
                    "steps": {name: round(seconds, 3) for name, seconds in m.steps.items()},
                }
                for m in self.moves
            ],
            "mean_jct_s": None if mean_jct is None else round(mean_jct, 1),
            "idle_gpu_s": None if idle is None else round(idle, 1),
            "lost_gpu_s": self.lost_gpu_s,
        }

    @property
    def idle_gpu_s(self) -> float | None:
        """GPU-seconds that no job held, until the last job ended."""
        return self.recording.idle_gpu_s(self.capacity)

    def faults(self) -> list[str]:
        """List why this run is not a success, one line each; empty if it is."""
        found = []
        for job in self.document()["jobs"]:
            who = f"{job['name']} (job {job['job_id']})"
            if job["state"] != "COMPLETED":
                found.append(f"{who} ended in state {job['state']}, expected COMPLETED")
                continue
            for key, what in (("jct_s", "completion time"), ("accuracy", "final accuracy")):
                if job[key] is None:
                    found.append(f"{who} has no {what}")
            for key, what in (("gpus", "GPUs over time"), ("batch_size", "batch size over time")):
                if not any(value > 0 for _, value in job[key]):
                    found.append(f"{who} has no {what}")
        return found

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.document(), indent=1) + "\n")


def _steps(values: Sequence[float], limit: int = 7) -> str:
    """Format successive different values, as in `1 > 4 > 8`.

    The middle of a long run is left out.
    """
    kept = [v for i, v in enumerate(values) if i == 0 or values[i - 1] != v]
    words = [f"{v:g}" for v in kept]
    if len(words) > limit:
        words = [*words[: limit - 3], "..", *words[-2:]]
    return " > ".join(words)


def job_table(summary: Summary) -> Table:
    """Return a table with one line per job: its resources and its result."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    for title in ("job", "name", "state"):
        table.add_column(title)
    for title in ("completed in", "accuracy", "noise scale", "moves"):
        table.add_column(title, justify="right")
    table.add_column("GPUs over time")
    table.add_column("batch size over time")
    for job in summary.document()["jobs"]:
        held = [int(n) for _, n in job["gpus"] if n > 0]
        table.add_row(
            *(str(job["job_id"]), job["name"], job["state"]),
            "-" if job["jct_s"] is None else f"{job['jct_s']:.0f} s",
            "-" if job["accuracy"] is None else f"{job['accuracy']:.3f}",
            f"{phi:.0f}" if (phi := summary.noise_scale.get(job["name"])) is not None else "-",
            *(str(job["moves"]), _steps(held), _steps([int(m) for _, m in job["batch_size"]])),
        )
    return table


def move_table(moves: Sequence[Move]) -> Table:
    """Return a table of move costs by path and step: median and worst."""
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("path")
    table.add_column("part")
    for column in ("median", "mean", "worst"):
        table.add_column(column, justify="right")
    for path in sorted({m.path for m in moves}):
        mine = [m for m in moves if m.path == path]
        names = dict.fromkeys(name for m in sorted(mine, key=lambda m: -len(m.steps)) for name in m.steps)
        rows: list[tuple[str, list[float]]] = [(n, [m.steps[n] for m in mine if n in m.steps]) for n in names]
        rows = [*rows, ("in all", [m.total_s for m in mine])] if len(rows) > 1 else rows
        for title, (name, values) in zip([f"{path} ({len(mine)})", *[""] * len(rows)], rows, strict=False):
            table.add_row(
                *(title, name, f"{median(values):.2f}", f"{mean(values):.2f}", f"{max(values):.2f}")
            )
        table.add_section()
    return table
