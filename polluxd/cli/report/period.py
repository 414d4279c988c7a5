"""`polluxctl report`: what happened in a period, as tables or JSON."""

from __future__ import annotations

import time
from dataclasses import asdict
from statistics import fmean
from typing import Annotated, Any

import typer

from .. import access
from ..access import ConfigOption, JsonOption, SinceOption, point
from ..output import Column, clock, count, duration, emit_json, number, table
from ..table_rows import MOVE_COLUMNS, move_row
from .figures import Figures, figures


def _hours(gpu_seconds: Any) -> str:
    return number(3)((gpu_seconds or 0.0) / 3600)


SHARE_COLUMNS = (
    Column("gpu_seconds", "GPU HOURS", _hours, right=True),
    Column("share", "SHARE OF GPU TIME", lambda v: f"{number(3)(100 * (v or 0.0))} %", right=True),
    Column("waited_s", "MEAN WAIT", duration, right=True),
    Column("completion_s", "MEAN COMPLETION", duration, right=True),
    Column("speedup", "MEAN SPEEDUP", number(3), right=True),
)
PATH_COLUMNS = (
    Column("path", "PATH"),
    Column("completed", "COMPLETED", right=True),
    Column("failed", "FAILED OR WITHDRAWN", right=True),
    Column("median_s", "MEDIAN COST", duration, right=True),
    Column("total_s", "TRAINING LOST", duration, right=True),
)
JOB_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True),
    Column("user", "USER"),
    Column("account", "ACCOUNT"),
    Column("state", "STATE"),
    Column("submitted_at", "SUBMITTED", clock),
    Column("completion_s", "COMPLETION", duration, right=True),
    Column("waited_s", "WAITED", duration, right=True),
    Column("gpu_seconds", "GPU HOURS", _hours, right=True),
    Column("speedup", "SPEEDUP", number(3), right=True),
    Column("moves", "MOVES", right=True),
    Column("lost_s", "LOST", duration, right=True),
)
REASON_COLUMNS = tuple(column for column in MOVE_COLUMNS if column.key not in ("id", "steps"))
"""Of a move: without the seconds of its steps."""
ACCOUNT_COLUMNS, USER_COLUMNS = (
    (Column("name", title, flexible=True), Column("jobs", "JOBS", right=True), *SHARE_COLUMNS)
    for title in ("ACCOUNT", "USER")
)
NOTE_COLUMNS = (Column("note", "NOTE", flexible=True), Column("cycles", "CYCLES", right=True))


def report(
    since: SinceOption = "24h",
    until: Annotated[
        str | None, typer.Option("--until", help="end, in the same form; now by default")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what happened in a period: jobs, waiting, shares, moves.

    JSON also has what each job held, over time.
    """
    now = time.time()
    begin = point(since, now, "--since")
    end = now if until is None else min(point(until, now, "--until"), now)
    if begin >= end:
        raise typer.BadParameter("expected a time before the end of the period", param_hint="--since")
    store, _ = access.open_store(config)
    found = figures(
        store.cluster,
        begin,
        end,
        views=store.jobs_view(),
        moves=store.moves(),
        costs=store.move_costs(),
        cycles=store.cycles_between(begin, end),
        speedups=store.mean_speedups(begin, end),
    )
    if as_json:
        emit_json(asdict(found))
        return
    console = access.console()
    console.print(summary(found))
    moves = [{**move_row(move), "total_s": found.costs.get(move.id)} for move in found.moves]
    notes = [{"note": note, "cycles": cycles} for note, cycles in found.decisions["notes"]]
    for title, rows, columns in (
        ("Jobs", found.jobs, JOB_COLUMNS),
        ("Accounts", found.accounts, ACCOUNT_COLUMNS),
        ("Users", found.users, USER_COLUMNS),
        ("Moves by path", found.paths, PATH_COLUMNS),
        ("Moves, newest first", moves, REASON_COLUMNS),
        ("Notes of decisions", notes, NOTE_COLUMNS),
    ):
        if rows:
            console.print()
            console.print(table(rows, columns, console.width, title))


def summary(found: Figures) -> str:
    """Return the period in a few lines."""
    decisions, ended, seconds = found.decisions, found.ended, max(found.until - found.since, 1.0)
    completion = fmean(job["completion_s"] for job in ended) if ended else None
    waited = fmean(job["waited_s"] for job in found.jobs) if found.jobs else None
    held = sum(job["gpu_seconds"] for job in found.jobs) / seconds
    gap = decisions["mean_gap"]
    moved = sum(move.id in found.costs for move in found.moves)  # a first placement is no move
    return "\n".join(
        (
            f"{found.cluster}, {clock(found.since)} to {clock(found.until)}",
            f"{count(len(found.jobs), 'job')}, {len(ended)} ended; mean completion {duration(completion)}, "
            f"mean wait {duration(waited)}; {number(3)(held)} GPUs held on average",
            f"{count(moved, 'move')}; training lost to moves: "
            f"{duration(sum(job['lost_s'] for job in found.jobs))}",
            f"{count(decisions['count'], 'decision')}, {number(3)(decisions['mean_s'])} s each, one in twenty over "
            f"{number(3)(decisions['slow_s'])} s; mean gap to the proven bound "
            f"{'-' if gap is None else number(3)(100 * gap)} %",
        )
    )
