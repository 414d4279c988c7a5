"""Traces of submitted jobs, the OSDI 2021 format, and the checked rows of CSV files.

An error names the file, the line and the remedy.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pollux.private_folder import open_named
from polluxd.errors import ConfigError
from polluxd.sim.applications import Application, most_gpus


class TraceError(ConfigError):
    """A trace or a profile is not usable."""


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a CSV file, and where it stands."""

    path: Path
    number: int
    """As an editor counts: the header is line 1."""
    values: dict[str, str]

    def fault(self, what: str, remedy: str) -> TraceError:
        return TraceError(f"{self.path}, line {self.number}: {what}; {remedy}")

    def text(self, column: str) -> str:
        value = (self.values.get(column) or "").strip()
        if not value:
            raise self.fault(f"no {column}", f"give the {column}, or remove the line")
        return value

    def number_in(self, column: str, low: float, high: float = math.inf) -> float:
        """A finite number from `low` to `high`."""
        value = self.text(column)
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not low <= number <= high or math.isinf(number):
            most = "" if math.isinf(high) else f" to {high:g}"
            raise self.fault(f"{column} is {value!r}", f"expected a number from {low:g}{most}")
        return number

    def whole(self, column: str, low: int) -> int:
        """A whole number from `low`."""
        number = self.number_in(column, low)
        if number != int(number):
            raise self.fault(f"{column} is {number:g}", "expected a whole number")
        return int(number)


_LONGEST = 1 << 16
"""Letters of a row."""


def lines(path: Path, columns: Sequence[str]) -> Iterator[Line]:
    """Yield the rows of a file with at least these columns, in order.

    Raises TraceError, and nothing else.
    """
    try:
        with io.TextIOWrapper(open_named(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(_rows(file))
            found = [name.strip() for name in reader.fieldnames or []]
            missing = [name for name in columns if name not in found]
            if missing:
                raise TraceError(
                    f"{path}, line 1: no column {' or '.join(missing)} among {', '.join(found) or 'none'}; "
                    f"the header must name {', '.join(columns)}"
                )
            reader.fieldnames = found
            for row in reader:
                if any(value for value in row.values()):
                    yield Line(path, reader.line_num, row)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (csv.Error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: is not a CSV file in UTF-8 ({error}); export it again") from None


def _rows(file: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a file. Raises csv.Error at one without an end: a file may have a hole of a terabyte."""
    for text in iter(partial(file.readline, _LONGEST), ""):
        if len(text) == _LONGEST:
            raise csv.Error(f"a line has {_LONGEST} letters and more")
        yield text


COLUMNS = ("name", "time", "application", "num_replicas", "batch_size")


@dataclass(frozen=True, slots=True)
class Submission:
    """One job of a trace."""

    name: str
    time: float
    """Seconds since the trace's start."""
    application: str
    gpus: int
    """What its user asked for; policies that size jobs themselves do not look at it."""
    batch_size: int
    """The user's own total batch size (tuned for `gpus` in the evaluation's traces)."""
    work: float = 1.0
    """Length of its training, in trainings of the application: traces that know only durations scale it."""
    rigid: bool = False
    """It runs on `gpus` GPUs and on no other number (`min-gpus` and `max-gpus`)."""
    gpu_counts: str = "any"
    """As `JobSpec.gpu_counts`, such as `multiples-of-8` for replicas of 8 GPUs."""


def read_workload(
    path: Path, applications: Mapping[str, Application], *, cluster_gpus: int
) -> tuple[Submission, ...]:
    """Read the jobs of a CSV file, in order of time.

    Columns: name, time [s], application, num_replicas, batch_size.

    Raises TraceError for an empty file, a missing column, an application without a profile, times that are negative
    or go back, a name used twice, and a job that the cluster or its batch limits could never hold.
    """
    jobs: list[Submission] = []
    seen: dict[str, int] = {}
    for line in lines(path, COLUMNS):
        name, app_name = line.text("name"), line.text("application")
        if name in seen:
            raise line.fault(f"job {name} stands on line {seen[name]} already", "give each job its own name")
        seen[name] = line.number
        app = applications.get(app_name)
        if app is None:
            known = ", ".join(sorted(applications)) or "none"
            raise line.fault(
                f"application {app_name!r} has no profile",
                f"known are {known}; add its profile or change the name",
            )
        time = line.number_in("time", 0)
        if jobs and time < jobs[-1].time:
            raise line.fault(
                f"time {time:g} is before the line above ({jobs[-1].time:g})", "sort the file by time"
            )
        gpus, batch = line.whole("num_replicas", 1), line.whole("batch_size", 1)
        if gpus > cluster_gpus:
            raise line.fault(
                f"num_replicas is {gpus} and the cluster has {cluster_gpus} GPUs",
                "simulate more nodes, or lower num_replicas",
            )
        low, high = app.limits.initial, app.limits.maximum
        if not low <= batch <= high:
            raise line.fault(
                f"batch_size {batch} is outside what {app_name} was validated at",
                f"give one from {low} to {high}",
            )
        if gpus > most_gpus(app):
            raise line.fault(
                f"num_replicas is {gpus} and {app_name} can use {most_gpus(app)} at most",
                "lower num_replicas",
            )
        jobs.append(Submission(name, time, app_name, gpus, batch))
    return checked(jobs, path)


def checked(jobs: Sequence[Submission], path: Path) -> tuple[Submission, ...]:
    """A trace with at least one job."""
    if not jobs:
        raise TraceError(f"{path}: no job in it; at least one line below the header is needed")
    return tuple(jobs)
