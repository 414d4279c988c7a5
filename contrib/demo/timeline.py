"""Draw the timeline of a run.

Each job has a lane with the GPUs that it held. The cluster's use is above the lanes, the batch sizes are below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

# Okabe and Ito's palette: colour-blind readers can tell its colours apart too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8c6d1f", "#777777")
INK, SOFT, FAINT = "#222222", "#8a8a8a", "#e2e2e2"
NARROW_S = 6.0
"""A span too short to write its number of GPUs in [s]."""

Job = dict[str, Any]


def _held(series: Sequence[Sequence[float]], grid: np.ndarray) -> np.ndarray:
    """Return a step series at each time of `grid`; 0 before its first entry."""
    if not series:
        return np.zeros_like(grid)
    times, values = np.asarray(series, dtype=float).T
    index = np.searchsorted(times, grid, side="right") - 1
    return np.where(index >= 0, values[np.maximum(index, 0)], 0.0)


def _spans(series: Sequence[Sequence[float]], end: float) -> Iterator[tuple[float, float, float]]:
    """(from, to, value) of each stretch."""
    if not series:
        return
    for (begin, value), (until, _) in zip(series, [*series[1:], (end, 0)], strict=True):
        yield begin, until, value


def _bare(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.tick_params(colors=INK, length=0, labelsize=8)


def _stack(axes: Axes, jobs: Sequence[Job], grid: np.ndarray) -> np.ndarray:
    """Draw the jobs' GPUs on top of each other; return their sum at each time of `grid`."""
    bottom = np.zeros_like(grid)
    for job, colour in zip(jobs, COLOURS * len(jobs), strict=False):
        top = bottom + _held(job["gpus"], grid)
        axes.fill_between(grid, bottom, top, step="post", color=colour, linewidth=0, label=job["name"])
        bottom = top
    return bottom


def _draw_use(axes: Axes, jobs: Sequence[Job], end: float, capacity: int) -> None:
    grid = np.arange(0.0, end + 0.25, 0.25)
    share = float(np.mean(_stack(axes, jobs, grid))) / capacity
    axes.axhline(capacity, color=SOFT, linewidth=0.8, linestyle=(0, (4, 3)))
    axes.set_ylim(0, capacity * 1.12)
    axes.set_yticks([0, capacity // 2, capacity])
    axes.set_ylabel("all", rotation=0, ha="right", va="center", fontsize=9, color=INK, labelpad=20)
    note = f"{capacity} GPUs, {100 * share:.0f} % held on average"
    axes.text(end, capacity * 1.16, note, ha="right", va="bottom", fontsize=8, color=SOFT)
    _bare(axes)


def _draw_lane(
    axes: Axes, job: Job, moves: Sequence[dict[str, Any]], colour: str, end: float, top: int
) -> None:
    series = job["gpus"]
    last = series[-1][0] if series else 0.0
    running = False
    for begin, until, value in _spans(series, last):
        if value > 0:
            running = True
            axes.fill_between([begin, until], 0, value, color=colour, linewidth=0)
            if until - begin >= NARROW_S:
                # Inside a band that is high enough, above a low one.
                inside = value >= 0.35 * top
                place = value / 2 if inside else value + 0.04 * top
                ink = "white" if inside else colour
                axes.text(
                    *((begin + until) / 2, place, f"{value:g}"),
                    **{"ha": "center", "va": "center" if inside else "bottom", "fontsize": 8, "color": ink},
                    weight="bold",
                )
        elif until > begin:
            # Waiting: at first for GPUs, later for a move.
            axes.fill_between([begin, until], 0, 0.12 * top, color=SOFT if running else FAINT, linewidth=0)
    for move in moves:
        axes.plot(move["at"], top * 1.02, marker="v", markersize=5, color=INK, clip_on=False)
    if job.get("jct_s") is not None:
        done = f" done, {job['jct_s']:.0f} s"
        axes.text(last, 0.10 * top, done, ha="left", va="bottom", fontsize=8, color=SOFT)
    axes.set_ylim(0, top * 1.12)
    axes.yaxis.set_major_locator(FixedLocator([0, top / 2, top]))
    axes.set_ylabel(job["name"], rotation=0, ha="right", va="center", fontsize=9, color=colour, labelpad=20)
    axes.yaxis.label.set_fontweight("bold")
    _bare(axes)


def _draw_batches(axes: Axes, jobs: Sequence[Job]) -> None:
    sizes: set[float] = set()
    for job, colour in zip(jobs, COLOURS * len(jobs), strict=False):
        series = [(t, m) for t, m in job["batch_size"] if m > 0]
        if not series:
            continue
        end = max(job["gpus"][-1][0] if job["gpus"] else 0.0, series[-1][0])
        times, values = zip(*series, (end, series[-1][1]), strict=True)
        axes.step(times, values, where="post", color=colour, linewidth=1.8)
        sizes.update(values)
    axes.set_yscale("log", base=2)
    if sizes:
        low, high = np.floor(np.log2(min(sizes))), np.ceil(np.log2(max(sizes)))
        axes.yaxis.set_major_locator(FixedLocator([2.0**k for k in np.arange(low, high + 1)]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_ylabel("batch\nsize", rotation=0, ha="right", va="center", fontsize=9, color=INK, labelpad=20)
    axes.set_xlabel("seconds since the first submission", fontsize=9, color=INK)
    _bare(axes)
    axes.tick_params(axis="x", length=3, color=SOFT)


def draw(
    jobs: Sequence[Job], moves: Sequence[dict[str, Any]], path: Path, *, capacity: int, title: str
) -> None:
    """Write the picture to `path`.

    Args:
        jobs: as in summary.json.
        moves: mappings with `job_id` and `at` [s since the start].
    """
    end = max([10.0, *(t for job in jobs for t, _ in job["gpus"])])
    top = max([4, *(int(n) for job in jobs for _, n in job["gpus"])])
    ratios = (1.2, *(1.0 for _ in jobs), 2.4)
    figure, panels = plt.subplots(
        len(ratios),
        1,
        figsize=(11, 0.85 * sum(ratios) + 1.2),
        dpi=130,
        sharex=True,
        gridspec_kw={"height_ratios": ratios, "hspace": 0.28},
        squeeze=False,
    )
    use, *lanes, below = panels[:, 0]
    _draw_use(use, jobs, end, capacity)
    for axes, job, colour in zip(lanes, jobs, COLOURS * len(jobs), strict=False):
        _draw_lane(axes, job, [m for m in moves if m["job_id"] == job["job_id"]], colour, end, top)
    _draw_batches(below, jobs)
    below.set_xlim(0, end * 1.09)
    use.set_title(title, loc="left", fontsize=12, color=INK, pad=16)
    figure.text(
        *(0.5, 0.005),
        "height and number: GPUs held     \N{BLACK DOWN-POINTING TRIANGLE} moved     "
        "low grey: waiting for GPUs, or between two placements",
        **{"ha": "center", "fontsize": 8, "color": SOFT},
    )
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)


def draw_side_by_side(runs: Sequence[tuple[str, Sequence[Job]]], path: Path, *, capacity: int) -> None:
    """Draw the same trainings in several runs, one below the other: GPUs by job, idle GPUs hatched.

    Args:
        runs: a title and the jobs of each run, as in summary.json.
    """
    ends = [max([10.0, *(t for job in jobs for t, _ in job["gpus"])]) for _, jobs in runs]
    figure, panels = plt.subplots(
        len(runs), 1, figsize=(11, 2.3 * len(runs) + 0.5), dpi=130, sharex=True, squeeze=False
    )
    for axes, (title, jobs), end in zip(panels[:, 0], runs, ends, strict=True):
        grid = np.arange(0.0, end, 0.25)
        held = _stack(axes, jobs, grid)
        axes.fill_between(
            *(grid, held, capacity),
            **{"step": "post", "facecolor": "none", "edgecolor": SOFT, "hatch": "///", "linewidth": 0},
        )
        axes.set_ylim(0, capacity * 1.02)
        axes.set_yticks([0, capacity // 2, capacity])
        axes.set_ylabel("GPUs", rotation=0, ha="right", va="center", fontsize=9, color=INK)
        axes.set_title(title, loc="left", fontsize=13, color=INK)
        _bare(axes)
    last = panels[-1, 0]
    last.set_xlim(0, max(ends) * 1.02)
    last.set_xlabel("seconds since the first submission; hatched: idle GPUs", fontsize=9, color=INK)
    handles, names = last.get_legend_handles_labels()
    figure.legend(handles, names, loc="lower center", ncols=len(names), fontsize=9, frameon=False)
    figure.subplots_adjust(bottom=0.17, hspace=0.4)
    figure.savefig(path, bbox_inches="tight", facecolor="white")
    plt.close(figure)
