"""From courses to what is told: quantiles, widened by what earlier forecasts missed. Pure.

Each side of an interval is moved by the quantile of what earlier forecasts of ended jobs missed on this side (conformal
quantile regression, on the logarithm of the time left). A side may also move inwards.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from polluxd.forecast.ahead import INTERVAL_S, Course
from polluxd.forecast.history import UNKNOWN

COVERED = 0.8
"""Share of jobs whose end is to lie within the interval, and that are to start by the time that is told."""
CHECKED = 20
"""Ended jobs from which a side is moved: of ten, the quantile of a tenth would be the farthest miss."""
MOST_OF_USER = 20
"""Jobs of one user that count for others: whoever declares false lengths spoils the own forecasts."""
_TAIL = (1.0 - COVERED) / 2
_LEAST_S = 1.0

Side = str
"""`starts`, `first` (the earlier side of an end) or `last`."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When one job starts and ends, as told at a time. Times are POSIX seconds."""

    job_id: int
    at: float
    by: str
    """What its length goes by (`polluxd.forecast.history`); empty: nothing tells, and no end is told."""
    drawn: Mapping[Side, float] = field(default_factory=dict)
    """Quantiles of the courses. A side is left out where too few courses reached it."""
    told: Mapping[Side, float] = field(default_factory=dict)
    """The same, moved by what earlier forecasts missed."""
    checked: int = 0
    """Ended jobs by which `told` was moved; 0: not moved yet."""
    user: str = ""


@dataclass(frozen=True, slots=True)
class Happened:
    """What became of a job that was forecast; None: not yet."""

    started_at: float | None
    ended_at: float | None


def drawn(job_id: int, at: float, by: str, courses: Sequence[Course], user: str = "") -> Forecast:
    """The quantiles of a job's courses. A course in which it does not end counts as later than all others."""
    ends = np.array([math.inf if course.ends is None else course.ends for course in courses])
    starts = np.array([math.inf if course.starts is None else course.starts for course in courses])
    sides: dict[Side, float] = {}
    if starts.max() > 0:
        # What frees the GPUs is seen by the decision after it.
        sides["starts"] = _quantile(starts, COVERED) + INTERVAL_S
    if by != UNKNOWN:
        sides |= {"first": _quantile(ends, _TAIL), "last": _quantile(ends, 1.0 - _TAIL)}
    found = {side: at + seconds for side, seconds in sides.items() if math.isfinite(seconds)}
    return Forecast(job_id, at, by, found, found, user=user)


def _quantile(values: NDArray[np.float64], share: float) -> float:
    place = share * (len(values) - 1)
    low, high = (float(v) for v in np.sort(values)[[math.floor(place), math.ceil(place)]])
    return low if low == high else low + (high - low) * (place - math.floor(place))


class Misses:
    """What past forecasts missed: of the same user, by what the length went by; else of all users; else of all jobs."""

    def __init__(self, forecasts: Iterable[Forecast], outcomes: Mapping[int, Happened]) -> None:
        found: dict[tuple[Side, str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        counted: dict[tuple[Side, str, str], set[int]] = defaultdict(set)
        for each in forecasts:
            outcome = outcomes.get(each.job_id)
            if outcome is None:
                continue
            for side, told in each.drawn.items():
                was = outcome.started_at if side == "starts" else outcome.ended_at
                if was is None or was < each.at:
                    continue
                miss = math.log(max(was - each.at, _LEAST_S) / max(told - each.at, _LEAST_S))
                for by, user in self._keys(each):
                    jobs = counted[side, by, each.user]
                    if user or each.job_id in jobs or len(jobs) < MOST_OF_USER:
                        found[side, by, user][each.job_id].append(-miss if side == "first" else miss)
                        jobs |= set() if user else {each.job_id}
        self._found = found

    @staticmethod
    def _keys(forecast: Forecast) -> tuple[tuple[str, str], ...]:
        return ((forecast.by, forecast.user or "-"), (forecast.by, ""), ("*", ""))

    def _of(self, side: Side, forecast: Forecast) -> Mapping[int, list[float]]:
        """By job; none where too few have ended."""
        known = (self._found.get((side, *key), {}) for key in self._keys(forecast))
        return next((found for found in known if len(found) >= CHECKED), {})

    def move(self, forecast: Forecast) -> Forecast:
        """Return the forecast with its sides moved."""
        told = dict(forecast.drawn)
        for side, at in forecast.drawn.items():
            misses = self._of(side, forecast)
            if misses:
                by = _weighted(misses, COVERED if side == "starts" else 1.0 - _TAIL)
                left = max(at - forecast.at, _LEAST_S)
                told[side] = forecast.at + left * math.exp(-by if side == "first" else by)
        if "first" in told and "last" in told and told["first"] > told["last"]:
            told["first"] = told["last"] = (told["first"] + told["last"]) / 2
        if "starts" in told and "last" in told:
            told["starts"] = min(told["starts"], told["last"])
        return replace(forecast, told=told, checked=len(self._of("last", forecast)))


def _weighted(misses: Mapping[int, list[float]], share: float) -> float:
    """The quantile of misses in which each job counts once, however often it was forecast."""
    pairs = sorted((miss, 1.0 / len(own)) for own in misses.values() for miss in own)
    # One more job may miss by anything.
    goal, sum_ = min(share * (len(misses) + 1), float(len(misses))), 0.0
    for miss, weight in pairs:
        sum_ += weight
        if sum_ >= goal - 1e-9:
            return miss
    return pairs[-1][0]


@dataclass(frozen=True, slots=True)
class Score:
    """How forecasts came true: jobs, each counted once however often it was forecast."""

    jobs: int
    within: float
    """Share whose end lay in the interval that was told."""
    by_start: float | None
    """Share that started by the time that was told; None: no such job."""
    width_s: float
    """Median width."""
    relative: float
    """Median width over the job's time on GPUs, from its start to its end."""


def score(forecasts: Iterable[Forecast], outcomes: Mapping[int, Happened]) -> Score | None:
    """Compare what was told with what happened; None where no job that was forecast has ended."""
    hits, starts = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    widths, length = defaultdict[int, list[float]](list), dict[int, float]()
    for each in forecasts:
        outcome = outcomes.get(each.job_id)
        if outcome is None or outcome.started_at is None:
            continue
        if "starts" in each.told and outcome.started_at >= each.at:
            starts[each.job_id].append(float(outcome.started_at <= each.told["starts"]))
        if outcome.ended_at is None or outcome.ended_at < each.at or "last" not in each.told:
            continue
        first, last = each.told["first"], each.told["last"]
        hits[each.job_id].append(float(first <= outcome.ended_at <= last))
        widths[each.job_id].append(last - first)
        length[each.job_id] = max(outcome.ended_at - outcome.started_at, _LEAST_S)
    if not hits:
        return None
    means = {job: float(np.mean(found)) for job, found in widths.items()}
    return Score(
        len(hits),
        float(np.mean([np.mean(found) for found in hits.values()])),
        float(np.mean([np.mean(found) for found in starts.values()])) if starts else None,
        float(np.median([*means.values()])),
        float(np.median([means[job] / length[job] for job in means])),
    )
