"""Traces of submitted jobs, and the OSDI 2021 format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from polluxd.sim.applications import Application, most_gpus
from polluxd.sim.tables import TraceError, lines

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
    search: str = ""
    """The search that it is a trial of."""


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
