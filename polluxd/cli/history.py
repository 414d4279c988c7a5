"""`polluxctl history JOB`: GPUs, batch size, goodput, noise over time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from polluxd.errors import PolluxError
from polluxd.store import HistoryPoint

from . import access, answers
from .access import ConfigOption, JsonOption, WatchOption
from .output import Column, clock, duration, emit_json, number, table
from .period import point
from .pinning import JobArgument
from .top import newest, redraw

HISTORY_COLUMNS = (
    Column("at", "FROM", clock),
    Column("lasted_s", "FOR", duration, right=True),
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", right=True, rank=5),
    Column("batch_size", "BATCH", right=True),
    Column("lr_factor", "LR", lambda v: f"x{number(3)(v)}", right=True, rank=4),
    Column("goodput", "GOODPUT", number(3), right=True),
    Column("throughput", "THROUGHPUT", number(3), right=True, rank=3),
    Column("noise_scale", "NOISE SCALE", number(3), right=True),
    Column("done", "DONE", lambda v: "-" if v is None else f"{100 * v:.0f}%", right=True, rank=1),
    Column("attempt", "ATTEMPT", right=True, rank=2),
)


def history(
    job: JobArgument,
    since: Annotated[
        str | None, typer.Option("--since", help="from this time on: 24h, 7d, 2026-11-20; all by default")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="draw a picture to this file (PNG, SVG, PDF)")
    ] = None,
    watch: WatchOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show how a job's GPUs, batch size, goodput and noise scale changed.

    One line for each stretch of time with the same GPUs and batch size. JSON and the picture have every report.
    """
    from_time = 0.0 if since is None else point(since, time.time(), "--since")
    source, console = answers.source(config), access.console()
    if watch and console.is_terminal:
        redraw(
            lambda: newest(stretches(source.history(job, from_time)[1]), HISTORY_COLUMNS, console), console
        )
        return
    name, points = source.history(job, from_time)
    if not points:
        raise PolluxError(
            f"job {job} has no reports{' in this time' if since else ''}: it is no Pollux job, has not reached its "
            "first steps, or its reports are older than database.history_days"
        )
    if plot is not None:
        from .history_plot import draw  # noqa: PLC0415 - matplotlib is an extra

        draw(points, f"job {job} {name}", plot)
    if as_json:
        emit_json([asdict(point) for point in points])
        return
    console.print(table(stretches(points), HISTORY_COLUMNS, console.width))
    if plot is not None:
        typer.echo(f"written: {plot}", err=True)


def stretches(points: Sequence[HistoryPoint]) -> list[dict[str, Any]]:
    """Return one row per stretch with the same attempt, GPUs and batch size.

    Rates are means over the stretch; the noise scale and the progress are its last.
    """
    groups = [
        list(group) for _, group in groupby(points, key=lambda p: (p.attempt, p.gpus, p.nodes, p.batch_size))
    ]
    ends = [group[0].at for group in groups[1:]] + [point.at for point in points[-1:]]
    return [_row(group, end) for group, end in zip(groups, ends, strict=True)]


def _row(group: Sequence[HistoryPoint], end: float) -> dict[str, Any]:
    first, last = group[0], group[-1]
    return {
        "at": first.at,
        "lasted_s": max(end - first.at, 0.0),
        "gpus": first.gpus,
        "nodes": first.nodes,
        "batch_size": first.batch_size,
        "lr_factor": last.lr_factor,
        "goodput": _mean(p.goodput for p in group),
        "throughput": _mean(p.throughput for p in group),
        "noise_scale": last.noise_scale,
        "done": min(last.progress / last.target, 1.0) if last.target else None,
        "attempt": first.attempt,
    }


def _mean(values: Iterable[float]) -> float | None:
    """Mean of the values above 0: a first report has measured nothing."""
    found = [value for value in values if value > 0]
    return fmean(found) if found else None
