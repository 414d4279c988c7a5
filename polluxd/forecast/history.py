"""What polluxd does not know, drawn from what has happened: how long jobs last, and which jobs come. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from pollux.parameters import NoiseScale
from polluxd.forecast.ahead import Newcomer, Work
from polluxd.model import Report, SnapshotJob
from polluxd.store import EndedJob

ENOUGH = 3
"""Ended jobs from which a length is drawn."""
DAYS = 14
"""How far back arrivals and lengths go."""
MOST_ARRIVALS = 300
_DAY_S = 86400.0

DECLARED, SAME_NAME, SAME_USER, ANYBODY, UNKNOWN = "declared", "name", "user", "all", ""
"""What a length goes by."""
Random = np.random.Generator


def steps(past: EndedJob) -> float | None:
    """Scale-invariant steps that it made; None: it reported none."""
    report = past.report
    return (
        report.progress if report is not None and report.params is not None and report.progress > 0 else None
    )


def ratio(past: EndedJob) -> float | None:
    """Steps that it made over those that it declared; None: it declared none."""
    made, target = steps(past), past.report.target if past.report is not None else None
    return made / target if made and target else None


def seconds(past: EndedJob) -> float:
    return past.seconds


def family(name: str) -> str:
    """The name without the numbers that tell runs apart: in one pass, however a user chose it."""
    return re.sub(r"[\W\d_]+", lambda found: "#" if re.search(r"\d", found[0]) else found[0], name)


class History:
    """The jobs that have ended, and the times at which jobs came.

    Args:
        submitted: of all jobs, those that have not ended included [POSIX s].
        since: from when on all of these are known [POSIX s].
    """

    def __init__(self, past: Sequence[EndedJob], submitted: Iterable[float], since: float) -> None:
        self._past = sorted(past, key=lambda p: p.submitted_at)
        self._submitted = sorted(at for at in submitted if at >= since)
        self._since = since
        self._levels: dict[tuple[str, str, str], list[EndedJob]] = {}
        for each in self._past:
            for key in self._keys(each.user, each.name):
                self._levels.setdefault(key, []).append(each)

    @staticmethod
    def _keys(user: str, name: str) -> list[tuple[str, str, str]]:
        return [(SAME_NAME, user, family(name)), (SAME_USER, user, ""), (ANYBODY, "", "")]

    def _drawn(
        self, user: str, name: str, value: Callable[[EndedJob], float | None], above: float, random: Random
    ) -> tuple[str, EndedJob, float] | None:
        """Draw a past job whose value is above one, of the nearest kind that has enough; None: none has."""
        for key in self._keys(user, name):
            known = [
                (past, found) for past in self._levels.get(key, ()) if (found := value(past)) is not None
            ]
            longer = [pair for pair in known if pair[1] > above]
            if len(known) >= ENOUGH and longer:
                past, found = longer[int(random.integers(len(longer)))]
                return key[0], past, found
        return None

    def work(self, job: SnapshotJob, held_s: float, random: Random) -> tuple[Work, str]:
        """Draw the rest of a job; return it, and what it goes by: empty where nothing tells.

        Args:
            held_s: seconds for which it has held its GPUs.
        """
        report = job.report
        limit = math.inf if job.time_limit is None else job.time_limit
        # A requeue sets Slurm's clock back, and nothing tells when the last one was.
        left = max(limit - (held_s if job.placement and not job.attempt else 0.0), 1.0)
        if report is not None and report.params is not None:
            done = report.progress
            if report.target is not None and report.target > done:
                drawn = self._drawn(job.user, job.name, ratio, done / report.target, random)
                # What other users declare says nothing of this one.
                share = 1.0 if drawn is None or drawn[0] == ANYBODY else drawn[2]
                return Work(
                    max(share * report.target - done, 1e-3), True, None, left, _noise(drawn)
                ), DECLARED
            drawn = self._drawn(job.user, job.name, steps, done, random)
            if drawn is not None and drawn[0] == SAME_NAME:
                return Work(drawn[2] - done, True, None, left, _noise(drawn)), SAME_NAME
        else:
            drawn = self._drawn(job.user, job.name, steps, 0.0, random)
            if drawn is not None and drawn[0] == SAME_NAME:
                return Work(drawn[2], True, _fresh(drawn[1].report), left), SAME_NAME
        drawn = self._drawn(job.user, job.name, seconds, held_s, random)
        if drawn is not None:
            return Work(drawn[2] - held_s, False, limit_s=left), drawn[0]
        # It outlived all, or there is none: others' starts are seen as if it doubled, and its own end is not told.
        return Work(max(held_s, 3600.0), False, limit_s=left), UNKNOWN

    def arrivals(self, now: float, horizon_s: float, first_id: int, random: Random) -> list[Newcomer]:
        """Draw the jobs that come within the horizon.

        Where at least a day is known: those that came at the same time on one of the days before, drawn for each course
        apart. Where less is known: as many as came per second, for as long ahead: ten minutes tell nothing of hours.
        """
        if len(self._past) < ENOUGH:
            return []
        days = min(int((now - self._since) // _DAY_S), DAYS)
        if days >= 1:
            begin = now - _DAY_S * int(random.integers(1, days + 1))
            came = [p for p in self._past if begin < p.submitted_at <= begin + horizon_s]
            times = [p.submitted_at - begin for p in came]
        else:
            known = max(now - self._since, 600.0)
            span = min(known, horizon_s)
            count = min(int(random.poisson(len(self._submitted) * span / known)), MOST_ARRIVALS)
            times = sorted(random.uniform(0.0, span, count).tolist())
            came = [self._past[int(n)] for n in random.integers(len(self._past), size=count)]
        return [
            Newcomer(after, _arriving(past, first_id + n, now + after), _whole(past))
            for n, (after, past) in enumerate(zip(times[:MOST_ARRIVALS], came, strict=False))
        ]


def _noise(drawn: tuple[str, EndedJob, float] | None) -> NoiseScale | None:
    """The noise at the end of a job of the same name."""
    report = drawn[1].report if drawn is not None and drawn[0] == SAME_NAME else None
    return None if report is None else report.noise


def _whole(past: EndedJob) -> Work:
    made = steps(past)
    return Work(past.seconds, False) if made is None else Work(made, True, _fresh(past.report))


def _fresh(report: Report | None) -> Report | None:
    """What a job of this kind reports at first."""
    if report is None:
        return None
    return replace(report, progress=0.0, attempt=0, explored_gpus=0, explored_nodes=0, first_step_at=None)


def _arriving(past: EndedJob, job_id: int, at: float) -> SnapshotJob:
    return SnapshotJob(
        job_id=job_id,
        name=past.name,
        user=past.user,
        account=past.account,
        partition=past.partition,
        spec=past.spec,
        submitted_at=at,
        age=0.0,
        resize_cost=2.0 if past.report is not None and past.report.resize == "in-place" else None,
    )
