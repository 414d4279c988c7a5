"""Rates of a job's progress, each as a share of what the job claimed then.

A rate is taken at one noise scale and one batch size: an honest job's noise scale grows, so its progress of an hour ago
says nothing of its present claims. What stays is the share of its claim that a job reaches: 1 at every number of GPUs
where its reports are true, and less on many GPUs than on few where it claims to scale better than it does.

No I/O, no clock: the times are those of the reports' arrival.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pollux.goodput import Goodput
from polluxd.model import Report

Floats = NDArray[np.float64]

WINDOW_S = 45.0
"""Shortest time over which a rate of progress is taken."""
PARTS, ENOUGH_S = 3, 75.0
"""A window has so many reports, which come every 30 s, or is at least so long: less could lie in a pause whole."""
EVEN = 0.8
"""Least ratio of the slowest to the fastest progress between two reports of one window: below, a pause lies in it."""
WINDOWS = 4
"""Newest rates of progress that each place keeps. Their median counts."""
NEAR_BEST = 0.9
"""Least share of its best goodput that a job is to have at its batch size, by its own claims. Below, it is on the way
to another batch size, and its progress says nothing of its claims."""
CONFIRMED = 3
"""Rates of a place on which a doubt may rest. In a single rate, short pauses may have slowed a job evenly, one between
every two reports: it moves no median of three."""
PAUSED_S = 300.0
"""Time after which a rate is taken all the same: the upper quartile between reports, since pauses only slow a job."""


class TrainedOn(NamedTuple):
    """Where a job trains, by Slurm's records."""

    gpus: int
    nodes: int
    gpu_type: str = ""
    """Empty where Slurm does not type its GPUs, or where the job has GPUs of several types."""


class Rate(NamedTuple):
    """Progress between two reports, or over a window of several."""

    steps: float
    """Scale-invariant steps per second."""
    share: float
    """Of what the job claimed then, at its noise scale then; 1 where it claimed nothing."""


class ProgressRates:
    """Rates of progress by place."""

    def __init__(self) -> None:
        self.place = TrainedOn(0, 0)
        self.advanced_at = 0.0
        """When progress was last seen to rise."""
        self.types: set[str] = set()
        """GPU types on which the job made a first step, rated or not."""
        self._rates: dict[TrainedOn, deque[Rate]] = {}
        self._newest: Report | None = None
        self._since = self._rated_at = 0.0
        # Between the reports since the present window began (a time without pauses), and since the last rate was taken.
        self._window: list[Rate] = []
        self._unrated: list[Rate] = []
        self._broken = True
        """The window begins at the next report: the job moved, or paused."""
        self._at_best = True
        self._claim = _Claim(0.0, True)
        """Of the newest report."""

    def newest(self, least: int = 1) -> Mapping[TrainedOn, Rate]:
        """Return the median of the newest rates of each place that has `least` rates or more."""
        return {place: _median(rates) for place, rates in self._rates.items() if len(rates) >= least}

    def here(self) -> Rate | None:
        """Return the rate in the present place; None where none was taken yet."""
        return _median(self._rates[self.place]) if self.place in self._rates else None

    def observe(self, report: Report, place: TrainedOn, *, adaptive: bool) -> bool:
        """Record the progress since the last report; tell whether it moved.

        A time in which a pause lies (evaluation, a checkpoint) says nothing of the job's speed: the window begins
        again. After a resize in place, the newest report may be of the place before it, so the first window begins at
        the next report.
        """
        if report.first_step_at is not None and place.gpus:
            self.types.add(place.gpu_type)
        before = self._newest
        restarted = before is None or before.attempt != report.attempt
        if before is None or restarted or self.place != place or report.first_step_at is None:
            self._newest, self.place, self._claim = report, place, _claim(report, place, adaptive)
            self._rated_at = self.advanced_at = report.at
            self._unrated = []
            self._begin_window(report)
            self._broken = not restarted
            return True
        seconds, steps = report.at - before.at, report.progress - before.progress
        if seconds <= 0:
            return False
        claim = _claim(report, place, adaptive)
        most, best = max(claim.steps, self._claim.steps), claim.at_best and self._claim.at_best
        self._newest, self._claim = report, claim
        if steps <= 0 or not place.gpus:
            self._broken = True
            return False
        self.advanced_at = report.at
        if self._broken:
            self._begin_window(report)
            return False
        # Against the larger of the two claims.
        rate = Rate(steps / seconds, steps / seconds / most if most > 0 else 1.0)
        self._window.append(rate)
        self._unrated.append(rate)
        self._at_best &= best
        lasted = report.at - self._since
        if lasted >= ENOUGH_S or (lasted >= WINDOW_S and len(self._window) >= PARTS):
            self._end_window(report)
        return False

    def _begin_window(self, report: Report) -> None:
        self._since, self._window, self._broken, self._at_best = report.at, [], False, True

    def _end_window(self, report: Report) -> None:
        shares = [rate.share for rate in self._window]
        even = min(shares) >= EVEN * max(shares) and self._at_best
        if even or report.at - self._rated_at >= PAUSED_S:
            mean = Rate(fmean(rate.steps for rate in self._window), fmean(shares))
            rate = mean if even else _upper_quartile(self._unrated)
            self._rates.setdefault(self.place, deque(maxlen=WINDOWS)).append(rate)
            self._rated_at, self._unrated = report.at, []
        self._begin_window(report)


def _median(rates: Collection[Rate]) -> Rate:
    return Rate(median(rate.steps for rate in rates), median(rate.share for rate in rates))


def _upper_quartile(rates: Collection[Rate]) -> Rate:
    return sorted(rates, key=attrgetter("share"))[-((len(rates) + 3) // 4)]


class _Claim(NamedTuple):
    """What a report claims for the job's present place."""

    steps: float
    """Scale-invariant steps per second, at the best batch size; 0 where it claims nothing."""
    at_best: bool
    """The job trains at this batch size, or nearly."""


def _claim(report: Report, place: TrainedOn, adaptive: bool) -> _Claim:
    if report.params is None or not place.gpus:
        return _Claim(0.0, True)
    best = float(claimed(report, [place], adaptive)[0])
    if not report.batch_size:
        return _Claim(best, True)
    limits, per_gpu = report.limits_on(place.gpu_type), report.batch_size / place.gpus
    passes = max(
        math.ceil(per_gpu / limits.local_max), 2 if per_gpu > limits.initial and place.gpus == 1 else 1
    )
    function = _goodput(report, place, adaptive)
    here = float(function.evaluate(place.nodes, place.gpus, per_gpu / passes, passes - 1)) / limits.initial
    return _Claim(best, here >= NEAR_BEST * best)


def _goodput(report: Report, place: TrainedOn, adaptive: bool) -> Goodput:
    params = report.params_by_type.get(place.gpu_type, report.params)
    assert params is not None
    return Goodput(params, report.noise, report.limits_on(place.gpu_type), adaptive)


def claimed(report: Report, places: Sequence[TrainedOn], adaptive: bool) -> Floats:
    """Return the scale-invariant steps per second [places] that a fit claims, at the best batch sizes."""
    found = [_goodput(report, place, adaptive).best(place.nodes, place.gpus)[2] for place in places]
    return np.array(found) / report.limits.initial
