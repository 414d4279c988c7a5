"""Compare plain jobs' waits beside Pollux jobs and without polluxd.

In the mixed run of `make compare` every second training is a plain job, as its user would size it. The others are
Pollux jobs. Without polluxd all are plain jobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean
from typing import Any

from rich.table import Table

from .measure import Recording
from .run import SAMPLE_S
from .workload import Size, Workload

MOST = 1.1
"""Plain jobs may wait this many times as long as without polluxd, on average."""


def plain_half(work: Workload, sizes: Mapping[str, Size]) -> dict[str, Size]:
    """Return the sizes of every second training, by arrival.

    The first training is a Pollux job: no job waits in an empty cluster.
    """
    arriving = sorted(work.trainings, key=lambda training: training.arrive_s)
    return {training.name: sizes[training.name] for training in arriving[1::2]}


@dataclass(frozen=True, slots=True)
class Waits:
    """Waits of the plain jobs of a mixed run, by name [s]."""

    beside: Mapping[str, float]
    without: Mapping[str, float]

    @property
    def mean_s(self) -> float:
        return mean(self.beside.values())

    @property
    def mean_without_s(self) -> float:
        return mean(self.without[name] for name in self.beside)

    @property
    def harmed(self) -> bool:
        """True where plain jobs wait too long, by more than the samples are apart."""
        return self.mean_s > MOST * self.mean_without_s + SAMPLE_S

    def document(self) -> dict[str, Any]:
        return {
            "plain": {
                name: {"wait_s": round(wait, 1), "wait_without_s": round(self.without[name], 1)}
                for name, wait in self.beside.items()
            },
            "mean_wait_s": round(self.mean_s, 1),
            "mean_wait_without_s": round(self.mean_without_s, 1),
        }

    def table(self) -> Table:
        table = Table(
            title="Plain jobs beside Pollux jobs",
            title_justify="left",
            pad_edge=False,
            box=None,
            header_style="bold",
        )
        table.add_column("name")
        for title in ("wait beside Pollux jobs", "wait without polluxd"):
            table.add_column(title, justify="right")
        for name, wait in self.beside.items():
            table.add_row(name, f"{wait:.0f} s", f"{self.without[name]:.0f} s")
        table.add_section()
        table.add_row("mean", f"{self.mean_s:.0f} s", f"{self.mean_without_s:.0f} s")
        return table


def waits(mixed: Recording, without: Recording, half: Mapping[str, Size]) -> Waits:
    """Return the waits of the plain jobs `half` in both runs."""
    beside, alone = (
        {track.name: track.wait_s for track in run.tracks.values() if track.wait_s is not None}
        for run in (mixed, without)
    )
    return Waits({name: beside[name] for name in half}, alone)
