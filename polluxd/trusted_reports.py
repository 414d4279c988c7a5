"""Decide which claims of a job's report polluxd believes.

polluxd checks the claims against its own records. The module does no I/O and reads no clock: the
caller gives every time.

An agent runs as the job's user and may report anything. polluxd knows by itself which GPUs the job has held and when
each report arrived. It compares:

- explored GPUs and nodes with the most that the job has held;
- the shape of the claimed goodput over GPUs with the progress that the ranks published at each number of GPUs, and with
  the physical bound (twice the GPUs bring at most twice the progress);
- progress with time: a job that publishes none gains no GPUs;
- the shape of the claims with nothing yet, while polluxd has not seen progress at the present size: such a job gains no
  GPUs beyond an equal share, since a job that leaps to its final size shows no second size to compare with;
- remaining work with history: a target stays, and a job that should have ended by its own account has none.

A claim that does not fit is replaced, and the replacement never asks for more than the records justify. The records
cannot expose a user who reports false progress consistently: see `tests/benchmarks/lying.md`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pollux.goodput import Goodput, ThroughputParams
from polluxd.model import Report

TOLERANCE = 1.3
"""Ratio of claimed to observed speedup between two numbers of GPUs from which a fit is not believed."""
WINDOW_S = 45.0
"""Shortest time over which a rate of progress is taken: reports come every 30 s."""
STALL_S = 150.0
"""Time without progress after which a job is given no further GPUs; evaluation may take as long."""
PATIENCE = 2.0
"""A job may take this many times as long as its remaining work says, and `PATIENCE_S` more."""
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Held:
    """What polluxd's own records say of one job."""

    gpus: int
    """GPUs that the job's present attempt trains on; 0: none, or a move is under way."""
    nodes: int
    most_gpus: int
    """Most GPUs that the job has ever held."""
    most_nodes: int
    equal_share: float | None = None
    """GPUs of the cluster over users with Pollux jobs; None: there is one such user, and growth has no such limit."""


@dataclass(slots=True)
class _ReportHistory:
    """What polluxd has seen of one job."""

    place: tuple[int, int] = (0, 0)
    """Numbers of GPUs and nodes."""
    attempt: int = -1
    since: float = 0.0
    progress: float = 0.0
    advanced_at: float = 0.0
    """When progress was last seen to rise."""
    rates: dict[tuple[int, int], float] = field(default_factory=dict)
    """Scale-invariant steps per second, by numbers of GPUs and nodes."""
    target: float | None = None
    ends_by: float = math.inf
    moved_target: bool = False
    doubted: int = 0
    """Reports with a claim that was not believed."""
    doubted_at: float = -math.inf
    """When the newest of these reports arrived."""


class TrustedReports:
    """The reports of all jobs, over time."""

    def __init__(self) -> None:
        self._jobs: dict[int, _ReportHistory] = {}
        self.doubted_reports = 0
        """Reports of all jobs with a claim that was not believed, since polluxd started."""

    def trust(
        self, reports: Mapping[int, Report], held: Mapping[int, Held], now: float
    ) -> tuple[dict[int, Report], dict[int, tuple[str, ...]]]:
        """Return the reports with doubtful claims replaced, and the doubts.

        Both are by job; the doubts say which claims polluxd replaced.

        Args:
            reports: the latest of each job; `Report.at` is when it arrived.
            held: polluxd's records; a job that is not named holds nothing.
            now: POSIX seconds.
        """
        trusted: dict[int, Report] = {}
        doubts: dict[int, tuple[str, ...]] = {}
        self.observe(reports, {job_id: (mine.gpus, mine.nodes) for job_id, mine in held.items()})
        for job_id, report in reports.items():
            history, found = self._jobs[job_id], list[str]()
            trusted[job_id] = _trusted(history, report, held.get(job_id, Held(0, 0, 0, 0)), now, found)
            if found:
                doubts[job_id] = tuple(found)
                if report.at > history.doubted_at:
                    history.doubted_at = report.at
                    history.doubted += 1
                    self.doubted_reports += 1
        for job_id in self._jobs.keys() - reports.keys():
            del self._jobs[job_id]
        return trusted, doubts

    def observe(self, reports: Mapping[int, Report], places: Mapping[int, tuple[int, int]]) -> None:
        """Record the jobs' progress, between decisions too.

        Args:
            reports: the latest of each job.
            places: numbers of GPUs and nodes of each job; a job that moves, or is not named, has none.
        """
        for job_id, report in reports.items():
            history = self._jobs.setdefault(job_id, _ReportHistory())
            _observe(history, report, places.get(job_id, (0, 0)))

    def seen(self, job_id: int) -> bool:
        """Tell whether the job's progress at its present size was seen."""
        history = self._jobs.get(job_id)
        return history is not None and history.place in history.rates

    def doubted(self, job_id: int) -> int:
        """Count the job's reports with a claim that was not believed."""
        history = self._jobs.get(job_id)
        return history.doubted if history else 0


def _observe(history: _ReportHistory, report: Report, place: tuple[int, int]) -> None:
    """Record a rate of progress for the job's present place.

    The job must have trained in the same place for at least `WINDOW_S`.
    """
    if (history.attempt, history.place) != (report.attempt, place) or report.first_step_at is None:
        # A rate across a move means nothing, so the rate and the stall clock start again.
        history.attempt, history.place = report.attempt, place
        history.since = history.advanced_at = report.at
        history.progress = report.progress
        return
    if report.progress > history.progress:
        history.advanced_at = report.at
    seconds = report.at - history.since
    if seconds < WINDOW_S or not place[0]:
        return
    rate = (report.progress - history.progress) / seconds
    if rate > 0:
        known = history.rates.get(place)
        history.rates[place] = rate if known is None else 0.5 * (known + rate)
    history.since, history.progress = report.at, report.progress


def _trusted(history: _ReportHistory, report: Report, held: Held, now: float, doubts: list[str]) -> Report:
    kept = _limited(report, explored_gpus=held.most_gpus, explored_nodes=held.most_nodes)
    if kept.explored_gpus < report.explored_gpus:
        doubts.append(f"explored_gpus={report.explored_gpus}: the job has held {held.most_gpus} at most")
    kept = _believable_fit(history, kept, doubts)
    if held.gpus and report.first_step_at is not None and now - history.advanced_at > STALL_S:
        if 2 * max(kept.explored_gpus, kept.prior_gpus) > held.gpus:
            doubts.append(f"no progress for {now - history.advanced_at:.0f} s: it gains no GPUs")
            kept = replace(kept, most_gpus=held.gpus)
    elif held.equal_share and (not history.rates or (held.gpus and history.place not in history.rates)):
        # A job that is moved at every decision would otherwise never show a second size to compare with.
        # No doubt is noted: each job passes through this at each new size.
        kept = replace(kept, most_gpus=max(math.ceil(held.equal_share), held.gpus))
    return _believable_target(history, kept, now, doubts)


def _limited(report: Report, **most: int) -> Report:
    """Return the report with these fields no larger than given."""
    beyond = {name: limit for name, limit in most.items() if getattr(report, name) > limit}
    return replace(report, **beyond) if beyond else report  # type: ignore[arg-type]


def _believable_fit(history: _ReportHistory, report: Report, doubts: list[str]) -> Report:
    """Replace a claimed fit that observed progress contradicts.

    The new fit comes from the observed progress.
    """
    rates = _physical(history.rates)
    if rates != history.rates:
        doubts.append("its progress: a speedup beyond the number of GPUs")
        history.rates.update(rates)
    if report.params is None or len(rates) < 2:
        return report
    places = sorted(rates)
    gpus, nodes = (np.array(column) for column in zip(*places, strict=True))
    claimed = Goodput(report.params, report.noise, report.limits, True).optimize(nodes, gpus).goodput
    seen = np.array([rates[place] for place in places])
    for small in range(len(places)):
        for large in range(small + 1, len(places)):
            said, was = claimed[large] / max(claimed[small], 1e-12), seen[large] / seen[small]
            if said > TOLERANCE * was and gpus[large] > gpus[small]:
                doubts.append(
                    f"its fit: {said:.1f} times the goodput on {gpus[large]} GPUs as on {gpus[small]}, "
                    f"its progress was {was:.1f} times as fast"
                )
                fit = fit_of(rates, report)
                # A job that is wrong about its speed is not believed about the time that it needs either.
                return replace(report, params=fit, noise=None, params_by_type={}, target=None)
    return report


def _physical(rates: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Limit the rates so that no speedup exceeds the number of GPUs."""
    bounded: dict[tuple[int, int], float] = {}
    for place in sorted(rates):
        most = min((TOLERANCE * r * place[0] / p[0] for p, r in bounded.items()), default=math.inf)
        bounded[place] = min(rates[place], most)
    return bounded


def fit_of(rates: Mapping[tuple[int, int], float], report: Report) -> ThroughputParams:
    """Return the fit that observed progress justifies.

    The fit holds at the initial batch size. Compute time divides over the GPUs at the speed of the smallest place.
    The additional time at larger places is synchronisation, and grows with the number of GPUs.
    """
    batch = report.limits.initial
    (least, _), slowest = min(rates.items())
    per_gpu = slowest * batch / least
    extra = [
        (gpus, 1.0 / rate - batch / (per_gpu * gpus)) for (gpus, _), rate in rates.items() if gpus > least
    ]
    each = max(0.0, float(np.mean([wait / gpus for gpus, wait in extra]))) if extra else 0.0
    return ThroughputParams(0.0, 1.0 / per_gpu, 2 * each, each, 2 * each, each, 1.0)


def _believable_target(history: _ReportHistory, report: Report, now: float, doubts: list[str]) -> Report:
    """Remove remaining work that contradicts the job's history."""
    if report.target is None:
        return report
    if history.target is None:
        history.target = report.target
    elif report.target > history.target * 1.001:
        history.moved_target = True
    rate = history.rates.get(history.place)
    if rate is None and report.goodput > 0:
        rate = report.goodput / report.limits.initial
    if rate:
        left = max(report.target - report.progress, 0.0) / rate
        history.ends_by = min(history.ends_by, now + PATIENCE * left + PATIENCE_S)
    if history.moved_target or now > history.ends_by:
        why = "its target has grown" if history.moved_target else "by its own account it should have ended"
        doubts.append(f"remaining work: {why}")
        return replace(report, target=None)
    return report
