"""Say what `make compare` measured, in the sentence that README has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

COMPARISON = Path(__file__).with_name("comparison.json")
"""What the last whole `make compare` wrote, without the jobs; `make docs-images` copies it."""
OURS = "polluxd"

Arms = Mapping[str, Mapping[str, Any]]


def measured() -> dict[str, Any]:
    """Return the committed comparison."""
    found: dict[str, Any] = json.loads(COMPARISON.read_text())
    return found


def gain(comparison: Mapping[str, Any]) -> str:
    """Return what polluxd gained against each way to size jobs under plain Slurm; `comparison` as in compare.json."""
    arms: Arms = comparison["arms"]
    ours = arms[OURS]
    theirs = sorted((fmean(arm["mean_jct_s"]), name) for name, arm in arms.items() if name != OURS)
    changes = [100 * (1 - fmean(ours["mean_jct_s"]) / mean) for mean, _ in theirs]
    listed = ", ".join(f"{name} {seconds(arms[name])}" for _, name in theirs)
    return (
        f"Under polluxd a training ended after {seconds(ours)} on average. Under plain Slurm that depends on how users "
        f"size their jobs: {listed}. So polluxd is {_between(min(changes), max(changes))}."
    )


def seconds(arm: Mapping[str, Any]) -> str:
    """Return the mean completion time, and its range where there are several runs."""
    runs = arm["mean_jct_s"]
    span = f" ({min(runs):.0f} to {max(runs):.0f} in {len(runs)} runs)" if len(runs) > 1 else ""
    return f"{fmean(runs):.0f} s{span}"


def _between(low: float, high: float) -> str:
    """Say a range of changes [%]: above 0 is sooner."""
    if low >= 0:
        return f"{low:.0f} to {high:.0f} % sooner"
    if high <= 0:
        return f"{-high:.0f} to {-low:.0f} % later"
    return f"between {-low:.0f} % later and {high:.0f} % sooner"
