"""Tables of the simulator's page: changes with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.stats import t as student

from tests.benchmarks.simulator_runs import Result

Of = Callable[[Result], float]
NOT_RUN = "Not run yet for these sources: `make bench-sim` continues where it stopped.\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown; rows without a figure are left out."""
    rows = [
        row for row in rows if any(cell not in ("-", "") and not cell.startswith("0 of") for cell in row[1:])
    ]
    if not rows:
        return NOT_RUN
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def change(ours: float, theirs: float) -> str:
    return f"{100 * (ours / theirs - 1):+.1f} %"


def averages(runs: Sequence[Result | None], *columns: tuple[Of, str]) -> list[str]:
    """Return one cell per column; a dash where some runs are missing."""
    made = [run for run in runs if run is not None]
    if len(made) < len(runs):
        return ["-"] * len(columns)
    return [f"{fmean(of(run) for run in made):{form}}" for of, form in columns]


MEASURES: list[tuple[str, Of, str]] = [
    ("mean JCT", lambda r: r["avg_jct_s"], ".0f"),
    ("p99 JCT", lambda r: r["p99_jct_s"], ".0f"),
    ("makespan", lambda r: r["makespan_s"], ".0f"),
    ("restarts", lambda r: r["avg_restarts"], ".2f"),
    ("fairness, mean", lambda r: r["finish_time_fairness"]["mean"], ".2f"),
    ("fairness, p99", lambda r: r["finish_time_fairness"]["p99"], ".2f"),
]


@dataclass(frozen=True)
class Pairs:
    """Pairs of our policy's runs and another policy's on the same traces."""

    title: str
    ours: list[Result | None]
    theirs: list[Result | None]

    @property
    def made(self) -> list[tuple[Result, Result]]:
        both = zip(self.ours, self.theirs, strict=True)
        return [(a, b) for a, b in both if a is not None and b is not None]

    def changes(self, of: Of) -> list[float]:
        """Relative changes, in percent, one per pair."""
        return [100.0 * (of(a) / of(b) - 1.0) for a, b in self.made]

    def row(self) -> list[str]:
        made, wanted = len(self.made), len(self.ours)
        number = str(made) if made == wanted else f"{made} of {wanted}"
        return [self.title, number, *(interval(self.changes(of)) for _, of, _ in MEASURES)]


def interval(changes: Sequence[float]) -> str:
    """The mean with its 95 % interval (Student's t over pairs)."""
    if not changes:
        return "-"
    mean = fmean(changes)
    if len(changes) < 2:
        return f"{mean:+.1f} %"
    half = float(student.ppf(0.975, len(changes) - 1)) * float(np.std(changes, ddof=1)) / len(changes) ** 0.5
    return f"{mean:+.1f} ± {half:.1f} %"


HEAD = ["against pollux-paper", "pairs", *(title for title, _, _ in MEASURES)]
