"""The figures of a period: jobs, waiting, shares, moves. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from polluxd.model import Move, Step
from polluxd.store import JobView, MoveCost

from .drawings import sums

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A time in which a job held the same GPUs."""

    begin: float
    """POSIX time."""
    end: float
    gpus: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All that the page shows."""

    cluster: str
    since: float
    until: float
    jobs: Sequence[Row]
    """What each job had in the period, `lane`: its stretches. A wait is time without
    GPUs, before the first start and later. A completion counts from the submission, also one before the period."""
    accounts: Sequence[Row]
    """What the jobs of each account got, by the keys of `GOT_COLUMNS`; the largest share of GPU time first."""
    users: Sequence[Row]
    paths: Sequence[Row]
    """The moves along each path, by the keys of `PATH_COLUMNS`."""


def figures(
    cluster: str,
    since: float,
    until: float,
    *,
    views: Sequence[JobView],
    moves: Sequence[Move],
    costs: Sequence[MoveCost],
    speedups: Mapping[int, float],
) -> Figures:
    """Put the figures of the period between two POSIX times together.

    `views`, `moves` and `costs` (of each completed move) are all known ones, `speedups` (mean predicted speedup by
    job) those of the period.
    """
    of_job: dict[int, list[Move]] = {}
    for move in moves:
        of_job.setdefault(move.job_id, []).append(move)
    cost_of = {cost["id"]: cost["total_s"] for cost in costs}
    planned = {m.id for m in moves if since <= m.times.get(Step.PLANNED, 0.0) <= until}
    jobs = [
        _job(view, of_job.get(view.job_id, []), cost_of, planned, speedups.get(view.job_id), (since, until))
        for view in views
        if view.submitted_at < until and (view.ended_at is None or view.ended_at > since)
    ]
    in_period = [move for move in moves if move.id in planned]
    return Figures(
        cluster=cluster,
        since=since,
        until=until,
        jobs=jobs,
        accounts=_shares(jobs, "account"),
        users=_shares(jobs, "user"),
        paths=_paths(in_period, cost_of),
    )


def held_and_waiting(found: Figures) -> dict[str, list[tuple[float, float]]]:
    """Return the GPUs that Pollux jobs held, and the least that waiting jobs needed, over time."""
    lanes = [(job["min_gpus"], stretch) for job in found.jobs for stretch in job["lane"]]
    return {
        "held": sums(((s.begin, s.end, s.gpus) for _, s in lanes), found.until),
        "waiting": sums(((s.begin, s.end, least) for least, s in lanes if not s.gpus), found.until),
    }


def _job(
    view: JobView,
    moves: Sequence[Move],
    cost_of: Mapping[int, float],
    planned: set[int],
    speedup: float | None,
    period: tuple[float, float],
) -> Row:
    since, until = period
    lane = stretches(view, moves, since, until)
    own = [move.id for move in moves if move.id in planned and move.id in cost_of]
    ended = view.ended_at if view.ended_at is not None and view.ended_at <= until else None
    return {
        **{key: getattr(view, key) for key in ("job_id", "name", "user", "account", "state", "submitted_at")},
        "min_gpus": view.spec.min_gpus,
        "lane": lane,
        "gpu_seconds": sum(s.gpus * (s.end - s.begin) for s in lane),
        "waited_s": sum(s.end - s.begin for s in lane if not s.gpus),
        "completion_s": None if ended is None else ended - view.submitted_at,
        "moves": len(own),
        "lost_s": sum(cost_of[number] for number in own),
        "speedup": speedup,
    }


def _shares(jobs: Sequence[Row], owner: str) -> list[Row]:
    """Group jobs by account or user; waits, completions and speedups are means over a group's known ones."""
    groups: dict[str, list[Row]] = {}
    for job in jobs:
        groups.setdefault(job[owner], []).append(job)
    everything = sum(job["gpu_seconds"] for job in jobs)
    shares = [
        {
            "name": name,
            "jobs": len(group),
            "gpu_seconds": (mine := sum(job["gpu_seconds"] for job in group)),
            "share": mine / everything if everything else 0.0,
            **{key: _mean(job[key] for job in group) for key in ("waited_s", "completion_s", "speedup")},
        }
        for name, group in groups.items()
    ]
    return sorted(shares, key=lambda share: (-share["gpu_seconds"], share["name"]))


def _paths(moves: Sequence[Move], cost_of: Mapping[int, float]) -> list[Row]:
    found = []
    for path in sorted({move.path for move in moves}):
        mine = [move for move in moves if move.path == path]
        costs = [cost_of[move.id] for move in mine if move.id in cost_of]
        steps = Counter(move.step for move in mine)
        found.append(
            {
                "path": path,
                "completed": steps[Step.TRAINING] + steps[Step.PARKED],
                "failed": steps[Step.FAILED],
                "median_s": median(costs) if costs else None,
                "total_s": sum(costs),
            }
        )
    return found


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def stretches(job: JobView, moves: Iterable[Move], since: float, until: float) -> list[Stretch]:
    """Return the stretches of a job between two POSIX times, in order.

    A stretch without GPUs is a wait. A job that polluxd never started (it started as a plain Slurm job) has held its
    present GPUs since its start.
    """
    changes = [(job.submitted_at, 0), *_changes(moves)]
    if job.ended_at is not None:
        changes.append((job.ended_at, 0))
    if job.started_at is not None and not any(gpus for _, gpus in changes):
        changes.append((job.started_at, job.gpus))
    changes.sort(key=lambda change: change[0])
    last = min(until, job.ended_at if job.ended_at is not None else until)
    found: list[Stretch] = []
    for number, (at, gpus) in enumerate(changes):
        end = changes[number + 1][0] if number + 1 < len(changes) else last
        begin, end = max(at, since), min(end, last)
        if begin >= end:
            continue
        if found and found[-1].gpus == gpus and found[-1].end == begin:
            begin = found.pop().begin
        found.append(Stretch(begin, end, gpus))
    return found


def _changes(moves: Iterable[Move]) -> list[tuple[float, int]]:
    changes = []
    for move in moves:
        if Step.REQUEUED in move.times:
            changes.append((move.times[Step.REQUEUED], 0))
        # As Slurm counts: a companion's GPUs from its start, those of a shrinking job until they are given back.
        shrinks = move.in_allocation and not move.grows
        reached = move.times.get(Step.CONFIGURED if shrinks else Step.STARTED, move.times.get(Step.TRAINING))
        if reached is not None:
            changes.append((reached, move.target.gpus))
            if move.grows and Step.FAILED in move.times:
                changes.append((move.times[Step.FAILED], move.source.gpus))
    return changes
