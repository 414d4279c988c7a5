"""Render the figures of a period as one HTML page without scripts.

Names of jobs, users and accounts, and reasons of Slurm's, are hostile: Jinja escapes every value, `printable` takes the
control characters out before, and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from polluxd.cli.output import clock, count, duration, number
from polluxd.cli.table_rows import move_row
from polluxd.printable import printable

from . import columns
from .drawings import COLOURS, Chart, Polyline, chart, clock_of, job_colours
from .figures import Figures, JobFigures, held_and_waiting

LANES = 60
"""Most jobs in the timeline: those with the most GPU time."""
ROWS = 500
"""Most rows of one table."""
WIDTH = 900.0
"""Width of the timeline's plot."""
LANE = 30.0
"""Height of a lane."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of the timeline."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    label: str
    """What a pointer that rests on it sees."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One job of the timeline."""

    job_id: int
    name: str
    y: float
    bars: Sequence[Bar]


def render(figures: Figures, version: str, now: float) -> str:
    """Return the page. `now` is the POSIX time at which it is made."""
    page = environment("polluxd.cli.report").get_template("page.html.jinja")
    by_time = sorted(figures.jobs, key=lambda job: -job.gpu_seconds)
    drawn = sorted(by_time[:LANES], key=attrgetter("view.submitted_at"))
    # Where all jobs have one account, colours tell the jobs apart.
    of_account = {share.name: f"c{place % COLOURS}" for place, share in enumerate(figures.accounts)}
    by_account = len(of_account) > 1
    colours = job_colours(job.view.job_id for job in by_time)
    if by_account:
        colours = {job.view.job_id: of_account[job.view.account] for job in by_time}
    return page.render(
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
        held=sum(job.gpu_seconds for job in figures.jobs) / max(figures.until - figures.since, 1.0),
        use=_use(figures),
        jobs=[_row(job) for job in sorted(figures.jobs, key=attrgetter("view.submitted_at"))[:ROWS]],
        moves=[{**move_row(move), "total_s": figures.costs.get(move.id)} for move in figures.moves[:ROWS]],
        notes=[{"note": note, "cycles": cycles} for note, cycles in figures.decisions.notes],
        columns=columns,
    )


def _row(job: JobFigures) -> dict[str, Any]:
    return {c.key: getattr(job if hasattr(job, c.key) else job.view, c.key) for c in columns.JOB_COLUMNS}


def environment(package: str) -> Environment:
    """Return the environment of a package's pages, with the report's drawings."""
    drawings = PackageLoader("polluxd.cli.report", ".")
    made = Environment(
        loader=ChoiceLoader([PackageLoader(package, "."), drawings]),
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


def _lanes(jobs: Sequence[JobFigures], figures: Figures, of_job: dict[int, str]) -> list[Lane]:
    most = max((stretch.gpus for job in jobs for stretch in job.lane), default=1) or 1
    lanes = []
    for place, job in enumerate(jobs):
        bars = []
        for stretch in job.lane:
            x = _x(stretch.begin, figures)
            width = max(_x(stretch.end, figures) - x, 0.5)
            share = stretch.gpus / most
            height = max(LANE * 0.85 * share, 2.0)
            held = count(stretch.gpus, "GPU") if stretch.gpus else "waits"
            bars.append(
                Bar(
                    x,
                    place * LANE + LANE * 0.9 - height,
                    width,
                    height,
                    of_job[job.view.job_id] if stretch.gpus else "plain",
                    f"{held}, {clock(stretch.begin)}, for {duration(stretch.end - stretch.begin)}",
                )
            )
        lanes.append(Lane(job.view.job_id, job.view.name, place * LANE, bars))
    return lanes


def _ticks(since: float, until: float) -> list[tuple[float, str]]:
    """Return nine named times; x in 0..WIDTH."""
    span = max(until - since, 1.0)
    name = clock_of(span)
    return [(WIDTH * part / 8, name(since + span * part / 8)) for part in range(9)]


def _use(figures: Figures) -> Chart:
    """Draw the GPUs held and waited for."""
    found = held_and_waiting(figures)
    lines = [
        Polyline("held by Pollux jobs", "c0", found["held"], steps=True, filled=True),
        Polyline("that waiting jobs need at least", "c1", found["waiting"], steps=True),
    ]
    return chart("GPUs", lines, times=True)
