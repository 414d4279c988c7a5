"""The picture: GPUs of each job over time, its batch size below, and where it was re-allocated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MultipleLocator, ScalarFormatter

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#777777")
INK, FAINT = "#222222", "#d9d9d9"


def _held(series: Sequence[Sequence[float]], grid: np.ndarray) -> np.ndarray:
    """Value of a step series at each time of `grid`; 0 before its first entry."""
    if not series:
        return np.zeros_like(grid)
    times, values = np.asarray(series, dtype=float).T
    index = np.searchsorted(times, grid, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], 0.0)


def _style(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#888888")
    axes.tick_params(colors=INK, length=3)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)


def _label_bands(axes: Axes, bottom: np.ndarray, top: np.ndarray, grid: np.ndarray, name: str) -> None:
    """Write the job's name inside its band where that is roomiest."""
    height = top - bottom
    if not height.any():
        return
    # The widest stretch of constant height, weighted by its height: room for a word.
    edges = np.flatnonzero(np.diff(height) != 0) + 1
    spans = np.split(np.arange(len(grid)), edges)
    best = max(spans, key=lambda s: len(s) * min(height[s[0]], 4.0))
    middle = best[len(best) // 2]
    if height[middle] >= 1:
        centre = (bottom[middle] + top[middle]) / 2
        axes.text(
            grid[middle], centre, name, ha="center", va="center", fontsize=9, color="white", weight="bold"
        )


def draw_gpus(axes: Axes, jobs: Sequence[dict[str, Any]], end: float, capacity: int) -> None:
    """Stacked steps: who holds how many GPUs."""
    grid = np.arange(0.0, end + 0.25, 0.25)
    bottom = np.zeros_like(grid)
    for job, colour in zip(jobs, COLOURS * len(jobs), strict=False):
        top = bottom + _held(job["gpus"], grid)
        axes.fill_between(
            grid, bottom, top, step="post", color=colour, linewidth=0, alpha=0.9, label=job["name"]
        )
        axes.step(grid, np.where(top > bottom, top, np.nan), where="post", color="white", linewidth=0.8)
        _label_bands(axes, bottom, top, grid, job["name"])
        bottom = top
    axes.axhline(capacity, color=INK, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.text(end, capacity, f"all {capacity}", ha="right", va="bottom", fontsize=8, color=INK)
    axes.set_ylim(0, capacity * 1.08)
    axes.yaxis.set_major_locator(MultipleLocator(4))
    axes.set_ylabel("GPUs")
    _style(axes)


def draw_batches(axes: Axes, jobs: Sequence[dict[str, Any]], moves: Sequence[dict[str, Any]]) -> None:
    """Batch size of each job; a dot where it was re-allocated."""
    for job, colour in zip(jobs, COLOURS * len(jobs), strict=False):
        series = [(t, m) for t, m in job["batch_size"] if m > 0]
        if not series:
            continue
        end = max(job["gpus"][-1][0] if job["gpus"] else 0.0, series[-1][0])
        times, sizes = zip(*series, (end, series[-1][1]), strict=True)
        axes.step(times, sizes, where="post", color=colour, linewidth=1.8, label=job["name"])
        for move in (m for m in moves if m["job_id"] == job["job_id"]):
            size = _held(series, np.array([move["at"]]))[0] or series[0][1]
            axes.plot(
                move["at"], size, marker="o", markersize=5.5, color="white", mec=colour, mew=1.6, zorder=5
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylabel("batch size M")
    axes.set_xlabel("seconds since the first submission")
    _style(axes)


def draw(
    jobs: Sequence[dict[str, Any]],
    moves: Sequence[dict[str, Any]],
    path: Path,
    *,
    capacity: int,
    title: str,
) -> None:
    """Write the picture. `jobs` as in summary.json; `moves` have job_id and at [s since the start]."""
    end = max([10.0, *(t for job in jobs for t, _ in job["gpus"])])
    figure, (above, below) = plt.subplots(
        2, 1, figsize=(11, 6.6), dpi=130, sharex=True, gridspec_kw={"height_ratios": (3, 2), "hspace": 0.08}
    )
    draw_gpus(above, jobs, end, capacity)
    draw_batches(below, jobs, moves)
    above.set_title(title, loc="left", fontsize=11, color=INK, pad=12)
    below.set_xlim(0, end)
    handles, names = above.get_legend_handles_labels()
    dot = plt.Line2D([], [], marker="o", color="white", mec=INK, mew=1.4, markersize=5.5, linestyle="none")
    below.legend(
        *([*handles, dot], [*names, "re-allocated"]),
        **{"loc": "upper center", "bbox_to_anchor": (0.5, -0.24), "ncols": len(names) + 1, "frameon": False},
    )
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)
