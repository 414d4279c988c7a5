"""What forecasts are made of, read from the database; and the document that is kept of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from polluxd.errors import PolluxError
from polluxd.forecast.courses import DRAWS, LEAST_DRAWS, MOST_JOBS, Courses, run_ahead, within_bound
from polluxd.forecast.history import DAYS, History
from polluxd.forecast.intervals import Forecast, Happened, Misses, drawn
from polluxd.model import DaemonMode, Snapshot
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.store import Store

DAY_S = 86400.0
MOST_PAST = 2000
"""Ended jobs that lengths and arrivals are drawn from: the newest."""


class CannotTell(PolluxError):
    """Nothing can be foretold now, as a whole. The text says why."""


@dataclass(frozen=True, slots=True)
class Picture:
    """One decision, and what happened before it."""

    cycle: int
    snapshot: Snapshot
    history: History
    held_s: Mapping[int, float]
    outcomes: Mapping[int, Happened]
    days: float
    """For which jobs are known."""

    @classmethod
    def read(cls, store: Store, now: float) -> Picture:
        """Read the newest decision with a snapshot. Raises CannotTell, StoreError."""
        newest = store.newest_snapshot()
        cycle = None if newest is None else store.cycle(newest[0])
        if newest is None or cycle is None:
            raise CannotTell("polluxd has not decided yet: wait for its first decision")
        if cycle.mode != DaemonMode.ENFORCE:
            raise CannotTell(
                f"polluxd is in mode {cycle.mode} and moves no job, so what it would decide foretells nothing; mode "
                "enforce has forecasts"
            )
        snapshot = within_bound(decode_snapshot(newest[1]))
        if snapshot.settings.paused:
            raise CannotTell("polluxd is paused and moves no job; `polluxctl resume` ends that")
        if len(snapshot.jobs) > MOST_JOBS:
            raise CannotTell(
                f"{len(snapshot.jobs)} jobs run, more than the {MOST_JOBS} whose courses fit into a twentieth of a core"
            )
        past = store.ended_jobs(now - DAYS * DAY_S, MOST_PAST)
        present = store.jobs_view(ended=False)
        times = [*(job.submitted_at for job in past), *(job.submitted_at for job in present)]
        since = min([past[0].ended_at if past else now, *(times if len(past) < MOST_PAST else ())])
        outcomes = {job.job_id: Happened(job.started_at, None) for job in present}
        outcomes |= {job.job_id: Happened(job.started_at, job.ended_at) for job in past}
        at = snapshot.taken_at
        held = {job.job_id: at - job.started_at for job in present if job.started_at is not None}
        return cls(
            newest[0], snapshot, History(past, times, since), held, outcomes, max(now - since, 0.0) / DAY_S
        )

    def ahead(self, enough: Callable[[], bool] = bool, drains: Mapping[str, float] | None = None) -> Courses:
        """Run ahead. The same decision always draws the same unknowns. Raises CannotTell."""
        found = run_ahead(
            self.snapshot, self.history, self.held_s, seed=self.cycle, drains=drains, enough=enough
        )
        if found.draws < LEAST_DRAWS:
            raise CannotTell(f"{found.draws} courses are too few for an interval")
        return found

    def forecasts(self, courses: Courses, misses: Misses) -> list[Forecast]:
        at = self.snapshot.taken_at
        found = (
            drawn(job.job_id, at, courses.by[job.job_id], courses.found[job.job_id], job.user)
            for job in self.snapshot.jobs
            if job.job_id in courses.found
        )
        return [misses.move(forecast) for forecast in found]


def foretold(
    picture: Picture, earlier: Iterable[Mapping[str, Any]], enough: Callable[[], bool] = bool
) -> dict[str, Any]:
    """Forecast; return the document that the database keeps. Raises CannotTell."""
    courses = picture.ahead(enough) if picture.snapshot.jobs else Courses({}, {}, DRAWS)
    misses = Misses(read(earlier), picture.outcomes)
    return {
        "cycle": picture.cycle,
        "at": picture.snapshot.taken_at,
        "courses": courses.draws,
        "days": round(picture.days, 1),
        "jobs": [asdict(each) for each in picture.forecasts(courses, misses)],
    }


def read(documents: Iterable[Mapping[str, Any]]) -> list[Forecast]:
    """The forecasts of kept documents."""
    return [Forecast(**each) for document in documents for each in document["jobs"]]


def with_weights(snapshot: Snapshot, weights: Mapping[str, float]) -> Snapshot:
    """Return the snapshot with other weights of accounts."""
    settings = snapshot.settings
    return replace(
        snapshot, settings=replace(settings, account_weights={**settings.account_weights, **weights})
    )


def compared(before: Courses, after: Courses) -> dict[int, Sequence[float | None]]:
    """By job: how much later it ends in each pair of courses with the same draws [s]; None: not within both."""
    return {
        job: [
            None if one.ends is None or other.ends is None else other.ends - one.ends
            for one, other in zip(seen, after.found[job], strict=False)
        ]
        for job, seen in before.found.items()
    }
