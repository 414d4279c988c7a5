"""Render the figures of a period as one HTML page without scripts.

Names of jobs, users and accounts, and reasons of Slurm's, are hostile: Jinja escapes every value, `printable` takes the
control characters out before, and the page's own policy forbids scripts and everything from elsewhere.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from polluxd.cli.output import clock, duration, number
from polluxd.printable import printable

from .drawings import Chart, Polyline, chart
from .figures import Figures, JobFigures, held_and_waiting

LANES = 60
"""Most jobs in the timeline: those with the most GPU time."""
ROWS = 500
"""Most rows of one table."""
WIDTH = 900.0
"""Width of the timeline's plot."""
LANE = 20.0
"""Height of a lane."""

# Okabe and Ito's palette: colour-blind readers can tell its colours apart too.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#8c6d1f", "#777777")


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of the timeline."""

    x: float
    y: float
    width: float
    height: float
    colour: str
    words: str
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
    of_account = {share.name: COLOURS[place % len(COLOURS)] for place, share in enumerate(figures.accounts)}
    drawn = sorted(
        sorted(figures.jobs, key=lambda job: -job.gpu_seconds)[:LANES], key=lambda job: job.view.submitted_at
    )
    # Where all jobs have one account, colours tell the jobs apart.
    by_account = len(figures.accounts) > 1
    colours = {
        job.view.job_id: of_account[job.view.account] if by_account else COLOURS[place % len(COLOURS)]
        for place, job in enumerate(figures.jobs)
    }
    longest = max((job.waited_s + job.held_s for job in figures.jobs), default=0.0)
    return page.render(
        figures=figures,
        version=version,
        now=now,
        zone=time.strftime("%Z", time.localtime(now)),
        lanes=_lanes(drawn, figures, colours),
        ticks=_ticks(figures.since, figures.until),
        colours=colours,
        colour_of_account=of_account,
        by_account=by_account,
        width=WIDTH,
        lane_height=LANE,
        longest=max(longest, 1.0),
        rows=ROWS,
        held=_held(figures),
        use=_use(figures),
    )


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


def _lanes(jobs: Sequence[JobFigures], figures: Figures, colours: dict[int, str]) -> list[Lane]:
    most = max((stretch.gpus for job in jobs for stretch in job.lane), default=1) or 1
    lanes = []
    for place, job in enumerate(jobs):
        bars = []
        for stretch in job.lane:
            x = _x(stretch.begin, figures)
            width = max(_x(stretch.end, figures) - x, 0.5)
            share = stretch.gpus / most
            height = max(LANE * 0.85 * share, 2.0)
            words = f"{stretch.gpus} GPUs" if stretch.gpus else "waits"
            bars.append(
                Bar(
                    x,
                    place * LANE + LANE * 0.9 - height,
                    width,
                    height,
                    colours[job.view.job_id] if stretch.gpus else "#c8c8c8",
                    f"{words}, {clock(stretch.begin)}, for {duration(stretch.end - stretch.begin)}",
                )
            )
        lanes.append(Lane(job.view.job_id, job.view.name, place * LANE, bars))
    return lanes


def _ticks(since: float, until: float) -> list[tuple[float, str]]:
    """Return about eight times with their words; x in 0..WIDTH."""
    span = max(until - since, 1.0)
    form = "%H:%M:%S" if span < 1800 else "%H:%M" if span < 2 * 86400 else "%m-%d %H:%M"
    return [
        (WIDTH * part / 8, datetime.fromtimestamp(since + span * part / 8).strftime(form))
        for part in range(9)
    ]


def _use(figures: Figures) -> Chart:
    """Draw the GPUs held and waited for."""
    found = held_and_waiting(figures)
    lines = [
        Polyline("held by Pollux jobs", "c0", found["held"], steps=True, filled=True),
        Polyline("that waiting jobs need at least", "c1", found["waiting"], steps=True),
    ]
    return chart("GPUs", lines, times=True)


def _held(figures: Figures) -> float:
    """Return the mean number of GPUs that Pollux jobs held."""
    return sum(job.gpu_seconds for job in figures.jobs) / max(figures.until - figures.since, 1.0)
