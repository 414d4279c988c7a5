"""Charts of lines over time or GPUs, for the report and the live page. Pure.

`drawings.html.jinja` draws them as SVG without scripts, in the classes of `drawings.css`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise

from polluxd.cli.output import number

Points = Sequence[tuple[float, float]]
"""x and y of each point, x ascending."""

WIDTH, HEIGHT = 480.0, 170.0
"""Of a chart's plot; a page scales it to the room that there is."""
MOST_POINTS = 400
"""A line of more points is thinned out: no screen shows them."""
MOST_VALUES = 60
"""Points of a line that show their value under the pointer."""
COLOURS = 7
"""Classes c0 to c6 of drawings.css."""


def job_colours(jobs: Iterable[int]) -> dict[int, str]:
    """Return the class of each job's colour, by job id: no other job's, while colours are left."""
    found: dict[int, str] = {}
    taken = set[int]()
    for job in jobs:
        colour = next(
            (n % COLOURS for n in range(job, job + COLOURS) if n % COLOURS not in taken), job % COLOURS
        )
        taken.add(colour)
        found[job] = f"c{colour}"
    return found


@dataclass(frozen=True, slots=True)
class Polyline:
    """One line of a chart."""

    label: str
    colour: str
    points: Points
    steps: bool = False
    """A value holds until the next point."""
    filled: bool = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A line in the chart's own coordinates."""

    label: str
    colour: str
    path: str
    area: str
    values: Sequence[tuple[float, float, str]]
    """Points with what they say under the pointer."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, ready to be drawn."""

    title: str
    lines: Sequence[Drawn]
    marks: Sequence[tuple[float, float, str]]
    x_ticks: Sequence[tuple[float, str]]
    y_ticks: Sequence[tuple[float, str]]
    moments: Sequence[tuple[float, str]]
    """Where something happened, and what."""
    newest: str
    """The last values as text, for who does not see the lines."""


def chart(
    title: str,
    lines: Sequence[Polyline],
    *,
    times: bool = False,
    marks: Sequence[tuple[float, float, str]] = (),
    ticks: Sequence[float] = (),
    moments: Sequence[tuple[float, str]] = (),
) -> Chart:
    """Return a chart from 0 to the largest value.

    Args:
        times: x is POSIX time.
        marks: x, y and name of points.
        ticks: values of x to name; by default some in equal distances.
        moments: x and name of what happened at a time. The chart leaves out what was before its first point.
    """
    known = [point for line in lines for point in line.points]
    known += [(x, y) for x, y, _ in marks]
    left, right = (f((x for x, _ in known), default=0.0) for f in (min, max))
    right = max(right, left + 1.0)
    step = _round_step(max((y for _, y in known), default=0.0))
    rows = max(math.ceil(max((y for _, y in known), default=0.0) / step - 1e-9), 1)

    def place(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - left) / (right - left), HEIGHT * (1 - y / (step * rows))

    show = number(3)
    named = ticks or [left + (right - left) * part / 4 for part in range(5)]
    name: Callable[[float], str] = clock_of(right - left) if times else lambda x: f"{x:g}"
    return Chart(
        title,
        [_line(line, place, right, name) for line in lines if line.points],
        [(*place(x, y), label) for x, y, label in marks],
        [(place(x, 0.0)[0], name(x)) for x in named],
        [(place(left, step * row)[1], f"{step * row:g}") for row in range(rows + 1)],
        [(place(x, 0.0)[0], f"{name(x)}: {label}") for x, label in moments if left <= x <= right],
        "; ".join(f"{line.label}: {show(line.points[-1][1])}" for line in lines if line.points),
    )


def _line(
    line: Polyline,
    place: Callable[[float, float], tuple[float, float]],
    right: float,
    name: Callable[[float], str],
) -> Drawn:
    points, show = thinned(line.points), number(3)
    values = [
        (*place(x, y), f"{line.label}: {show(y)} at {name(x)}") for x, y in thinned(line.points, MOST_VALUES)
    ]
    if line.steps and points:
        stairs = [points[0]]
        for (_, before), (x, y) in pairwise(points):
            stairs += [(x, before), (x, y)]
        points = [*stairs, (max(right, points[-1][0]), points[-1][1])]
    placed = [place(x, y) for x, y in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
    area = f"{path}L{placed[-1][0]:.1f} {HEIGHT}L{placed[0][0]:.1f} {HEIGHT}Z" if line.filled else ""
    return Drawn(line.label, line.colour, path, area, values)


def thinned(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """Return at most so many of the points: every so many-th, and the last."""
    stride = max(math.ceil(len(points) / most), 1)
    return [*points[:-1][::stride], *points[-1:]]


def _round_step(highest: float) -> float:
    """Return 1, 2 or 5 times a power of ten; about four of them reach `highest`."""
    if highest <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit * 4 >= highest * 0.999)


def clock_of(span: float) -> Callable[[float], str]:
    """Return the form of the times of a period of so many seconds."""
    form = "%H:%M:%S" if span < 1800 else "%H:%M" if span < 2 * 86400 else "%m-%d %H:%M"
    form = "%Y-%m-%d" if span >= 10 * 86400 else form
    return lambda at: datetime.fromtimestamp(at).strftime(form)


_OF_USE = {
    "held": ("held by Pollux jobs", "ink"),
    "plain": ("held by plain jobs", "plain"),
    "idle": ("idle", "ink dotted"),
    "waiting": ("that waiting jobs need at least", "ink dashed"),
}
"""Colours are those of jobs alone."""


def use_chart(use: Mapping[str, Points]) -> Chart:
    """Draw GPUs over time: those that somebody held, that were idle, that were waited for, as far as they are known."""
    lines = [
        Polyline(label, colour, use[key], steps=True, filled=key == "held")
        for key, (label, colour) in _OF_USE.items()
        if key in use
    ]
    return chart("GPUs", lines, times=True)
