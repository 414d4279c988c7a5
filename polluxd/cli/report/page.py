"""`polluxctl report --html FILE`: one page on a period, without scripts; and charts as a page of their own.

Names of jobs, users and accounts, and reasons of Slurm's, are hostile: Jinja escapes every value, `printable` takes the
control characters out before, and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pollux.version import __version__
from polluxd.errors import ConfigError
from polluxd.printable import printable

from .. import access
from ..access import ConfigOption, SinceOption, point
from ..output import Column, clock, count, duration, number
from ..table_rows import MOVE_COLUMNS, move_row
from .drawings import COLOURS, Chart, clock_of, job_colours, use_chart
from .figures import Figures, Row, figures, held_and_waiting


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

LANES = 60
"""Most jobs in the timeline: those with the most GPU time."""
ROWS = 500
"""Most rows of one table."""
WIDTH = 900.0
"""Width of the timeline's plot."""
LANE = 30.0
"""Height of a lane."""


def report(
    html: Annotated[Path, typer.Option("--html", help="write the page to this file")],
    since: SinceOption = "24h",
    until: Annotated[
        str | None, typer.Option("--until", help="end, in the same form; now by default")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Write one HTML page on a period: jobs, waiting, shares, moves.

    The page needs no network and runs no script. It holds names of jobs, users and accounts.
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
    _write("--html", html, render(found, __version__, now))
    typer.echo(f"written: {html} ({len(found.jobs)} jobs, {len(found.moves)} moves)")


def write_charts(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write charts as a page that needs no network. Raises ConfigError: the file cannot be written."""
    if path.suffix != ".html":
        raise ConfigError(
            f"--plot {path}: expected a name that ends in .html; a browser saves the page as a PDF"
        )
    _write("--plot", path, environment().get_template("charts.html.jinja").render(title=title, charts=charts))
    typer.echo(f"written: {path}", err=True)


def _write(option: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from None


def render(figures: Figures, version: str, now: float) -> str:
    """Return the page. `now` is the POSIX time at which it is made."""
    by_time = sorted(figures.jobs, key=lambda job: -job["gpu_seconds"])
    drawn = sorted(by_time[:LANES], key=itemgetter("submitted_at"))
    # Where all jobs have one account, colours tell the jobs apart.
    of_account = {share["name"]: f"c{place % COLOURS}" for place, share in enumerate(figures.accounts)}
    by_account = len(of_account) > 1
    colours = job_colours(job["job_id"] for job in by_time)
    if by_account:
        colours = {job["job_id"]: of_account[job["account"]] for job in by_time}
    return (
        environment()
        .get_template("page.html.jinja")
        .render(
            figures=figures,
            version=version,
            now=now,
            zone=time.strftime("%Z", time.localtime(now)),
            lanes=_lanes(drawn, figures, colours),
            ticks=_ticks(figures.since, figures.until),
            colour_of_account=of_account,
            by_account=by_account,
            width=WIDTH,
            lane_height=LANE,
            rows=ROWS,
            held=sum(job["gpu_seconds"] for job in figures.jobs) / max(figures.until - figures.since, 1.0),
            use=use_chart(held_and_waiting(figures)),
            jobs=sorted(figures.jobs, key=itemgetter("submitted_at"))[:ROWS],
            moves=[
                {**move_row(move), "total_s": figures.costs.get(move.id)} for move in figures.moves[:ROWS]
            ],
            notes=[{"note": note, "cycles": cycles} for note, cycles in figures.decisions["notes"]],
            columns={
                "jobs": JOB_COLUMNS,
                "accounts": ACCOUNT_COLUMNS,
                "users": USER_COLUMNS,
                "paths": PATH_COLUMNS,
                "moves": REASON_COLUMNS,
                "notes": NOTE_COLUMNS,
            },
        )
    )


def environment() -> Environment:
    """Return the environment of the report's and the live page's templates."""
    packages = ("polluxd.cli.report", "polluxd.cli.web")
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalize,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        clock=clock, duration=duration, number=number(3), coordinate=lambda value: f"{value:.1f}"
    )
    return made


def _finalize(value: Any) -> Any:
    """Show control characters as escapes, and nothing as a dash."""
    if value is None or value == "":
        return "-"
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _x(at: float, figures: Figures) -> float:
    return WIDTH * (at - figures.since) / max(figures.until - figures.since, 1.0)


def _lanes(jobs: Sequence[Row], figures: Figures, of_job: dict[int, str]) -> list[dict[str, Any]]:
    """Return the timeline: for each job where its lane lies, and its bars with what a pointer on them sees."""
    most = max((stretch.gpus for job in jobs for stretch in job["lane"]), default=1) or 1
    lanes = []
    for place, job in enumerate(jobs):
        bars = []
        for stretch in job["lane"]:
            x = _x(stretch.begin, figures)
            height = max(LANE * 0.85 * stretch.gpus / most, 2.0)
            held = count(stretch.gpus, "GPU") if stretch.gpus else "waits"
            bars.append(
                {
                    "x": x,
                    "y": place * LANE + LANE * 0.9 - height,
                    "width": max(_x(stretch.end, figures) - x, 0.5),
                    "height": height,
                    "colour": of_job[job["job_id"]] if stretch.gpus else "plain",
                    "label": f"{held}, {clock(stretch.begin)}, for {duration(stretch.end - stretch.begin)}",
                }
            )
        lanes.append({"job_id": job["job_id"], "name": job["name"], "y": place * LANE, "bars": bars})
    return lanes


def _ticks(since: float, until: float) -> list[tuple[float, str]]:
    """Return nine named times; x in 0..WIDTH."""
    span = max(until - since, 1.0)
    name = clock_of(span)
    return [(WIDTH * part / 8, name(since + span * part / 8)) for part in range(9)]
