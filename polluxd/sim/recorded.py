"""Recorded traces: Philly, Helios and `sacct` output.

Such traces say how many GPUs a job held and for how long, not what it trained. The rule that assigns applications:
of those that can use that many GPUs, the one whose whole training, on those GPUs at a batch size scaled with them (as
users do), takes the time nearest to the recorded one, by ratio; its length is then scaled so that the job, run as it
was, takes exactly the time recorded. What a policy would have made of it follows from that application's behaviour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from polluxd.sim.applications import Application, most_gpus, placement_of, split_batch
from polluxd.sim.workload import Line, Submission, TraceError, checked, lines

SHORTEST = 60.0
"""Jobs that ran for less are left out: failed starts, for the most part [s]."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One job as a log has it."""

    line: Line
    name: str
    submitted: float
    """POSIX seconds."""
    seconds: float
    gpus: int


def _stamp(line: Line, column: str) -> float:
    value = line.text(column)
    try:
        # Logs carry local times without a zone: only differences matter here.
        return (datetime.fromisoformat(value.replace("Z", "")) - datetime(1970, 1, 1)).total_seconds()
    except (ValueError, TypeError):
        raise line.fault(f"{column} is {value!r}", "expected a time such as 2024-05-01T13:37:00") from None


def _philly(line: Line) -> Recorded | None:
    gpus = line.whole("num_gpus", 0)
    if gpus == 0:
        return None
    name = f"philly-{line.number}"
    return Recorded(line, name, _stamp(line, "timestamp"), line.number_in("duration", 0), gpus)


def _helios(line: Line) -> Recorded | None:
    gpus = line.whole("gpu_num", 0)
    if gpus == 0:
        return None
    name = f"helios-{line.number}"
    return Recorded(line, name, _stamp(line, "submit_time"), line.number_in("duration", 0), gpus)


_TRES = re.compile(r"gres/gpu(:[^=,]+)?=(\d+)")
_ELAPSED = re.compile(r"(?:(\d+)-)?(\d+):(\d+):(\d+)")


def _sacct(line: Line) -> Recorded | None:
    number = line.text("JobID")
    tres = line.values.get("AllocTRES") or ""
    found = [(kind, int(n)) for kind, n in _TRES.findall(tres)]
    # A GPU of a named type is counted under its own name and, where Slurm is told to, under the plain one.
    gpus = max(sum(n for kind, n in found if not kind), sum(n for kind, n in found if kind))
    # Steps repeat their job; jobs without GPUs, or that never ran, have nothing to replay.
    if "." in number or gpus == 0:
        return None
    elapsed = _ELAPSED.fullmatch(line.text("Elapsed"))
    if elapsed is None:
        raise line.fault(
            f"Elapsed is {line.text('Elapsed')!r}", "expected [DAYS-]HH:MM:SS, as sacct prints it"
        )
    days, hours, minutes, seconds = (int(part or 0) for part in elapsed.groups())
    total = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    return Recorded(line, f"job-{number}", _stamp(line, "Submit"), float(total), gpus)


@dataclass(frozen=True, slots=True)
class Format:
    """A kind of log: how to tell it, and how to read a line."""

    columns: tuple[str, ...]
    delimiter: str
    read: Callable[[Line], Recorded | None]


PHILLY = Format(("timestamp", "duration", "num_gpus"), ",", _philly)
HELIOS = Format(("submit_time", "duration", "gpu_num"), ",", _helios)
SACCT = Format(("JobID", "Submit", "Elapsed", "AllocTRES"), "|", _sacct)


def recognise(path: Path) -> Format | None:
    """Return the format of a log by its header; None for another file.

    Of these files, only the output of `sacct --parsable2` has columns between bars.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            header = file.readline()
    except (OSError, UnicodeDecodeError):
        return None
    if "|" in header:
        return SACCT
    names = {name.strip() for name in header.split(",")}
    return next((f for f in (PHILLY, HELIOS) if names.issuperset(f.columns)), None)


def read_recorded(
    path: Path,
    kind: Format,
    applications: Mapping[str, Application],
    *,
    cluster_gpus: int,
    gpus_per_node: int,
    most_jobs: int | None = None,
) -> tuple[Submission, ...]:
    """Return the log's jobs that ran on GPUs for a minute or more.

    From its first submission on. Raises TraceError.

    Logs need not be sorted. `most_jobs`: the first so many.
    """
    found: list[Recorded] = []
    for line in lines(path, kind.columns, delimiter=kind.delimiter):
        job = kind.read(line)
        if job is not None and job.seconds >= SHORTEST:
            if job.gpus > cluster_gpus:
                raise line.fault(
                    f"{job.gpus} GPUs, and the cluster has {cluster_gpus}",
                    "simulate more nodes, or remove the line",
                )
            found.append(job)
    found.sort(key=lambda job: (job.submitted, job.line.number))
    found = found[:most_jobs]
    assign = Assignment(applications, gpus_per_node)
    names: dict[str, int] = {}
    jobs = []
    for job in found:
        # A requeued job stands in sacct's output once for each of its runs.
        names[job.name] = names.get(job.name, 0) + 1
        name = job.name if names[job.name] == 1 else f"{job.name}+{names[job.name] - 1}"
        jobs.append(assign.submission(job, name, job.submitted - found[0].submitted))
    if not jobs:
        raise TraceError(
            f"{path}: no job that ran on GPUs for {SHORTEST:.0f} s; for sacct, ask for a longer time and for "
            "--format=JobID,Submit,Elapsed,AllocTRES"
        )
    return checked(jobs, path)


class Assignment:
    """The rule of this module's docstring, over some applications."""

    def __init__(self, applications: Mapping[str, Application], gpus_per_node: int) -> None:
        self._apps = applications
        self._per_node = gpus_per_node
        self._known: dict[tuple[str, int], tuple[int, float]] = {}

    def _trained(self, name: str, gpus: int) -> tuple[int, float]:
        """Return the batch size for so many GPUs, and the seconds at it."""
        key = (name, gpus)
        if key not in self._known:
            app = self._apps[name]
            limits = app.limits
            batch = min(max(limits.initial * gpus, limits.local_min * gpus), limits.maximum)
            if app.fixed_batch is not None:
                batch = app.fixed_batch
            m, s = split_batch(batch, gpus, limits)
            step, sync = app.times(placement_of(gpus, self._per_node), m)
            self._known[key] = batch, app.iterations(batch, app.epochs - 1) * (step + s * (step - sync))
        return self._known[key]

    def submission(self, job: Recorded, name: str, time: float) -> Submission:
        able = [n for n, app in self._apps.items() if most_gpus(app) >= job.gpus]
        if not able:
            raise job.line.fault(
                f"no application can use {job.gpus} GPUs", "give profiles of one that can, or remove the line"
            )

        def ratio(app: str) -> float:
            return abs(math.log(job.seconds / self._trained(app, job.gpus)[1]))

        chosen = min(sorted(able), key=ratio)
        batch, seconds = self._trained(chosen, job.gpus)
        return Submission(name, time, chosen, job.gpus, batch, job.seconds / seconds)


def kinds(jobs: Sequence[Submission]) -> Iterator[tuple[str, int]]:
    """How many jobs each application was assigned, by name."""
    for name in sorted({job.application for job in jobs}):
        yield name, sum(job.application == name for job in jobs)
