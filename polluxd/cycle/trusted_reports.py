"""Decide which claims of a job's report polluxd believes.

polluxd checks the claims against its own records. The module does no I/O and reads no clock: the
caller gives every time.

An agent runs as the job's user and may report anything. polluxd knows by itself which GPUs the job has held, their
types, and when each report arrived. It compares:

- explored GPUs and nodes with the most that the job has held;
- the claimed goodput at each number of GPUs with the progress that the ranks published there. Each rate of progress is
  compared with the goodput at the noise scale that was claimed at that time, since an honest job's noise scale grows:
  its progress on 16 GPUs early says nothing of 4 GPUs late. Only what the job reaches of its claim counts, at one
  number of GPUs against another, and only if its present claims are contradicted, too (`_contradictions`);
- progress with the physical bound (twice the GPUs bring at most twice the progress at one noise scale);
- progress with time: a job that publishes none gains no GPUs;
- the shape of the claims with nothing yet, while polluxd has not seen progress at the present size: such a job gains no
  GPUs beyond an equal share, since a job that leaps to its final size shows no second size to compare with;
- claims about GPU types with Slurm's nodes: a job is believed to be faster only on types on which it has trained;
- remaining work with history: the samples that remain fall as the job trains. The target itself moves in an honest job,
  since its agent counts the samples that remain at their present worth (`job.epochs`).

A claim that does not fit is replaced, and the replacement never asks for more than the records justify. A doubt is for
what an honest job cannot say or do: it has explored GPUs that it never held, its remaining samples grow, it keeps GPUs
that it was asked for. All else is not confirmed, which is no accusation: a training that has become slower (longer
sequences, a second phase, a hot or a shared node) contradicts what it reported before, and a false curve does, too.
In a new attempt the remaining samples may have grown: its user may have added epochs, or chosen another M0. The records
cannot expose a user who reports false progress consistently: see `tests/benchmarks/lying.md`. What an honest job is
believed through is in `tests/benchmarks/honesty.md`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import NamedTuple

import numpy as np

from pollux.goodput import ThroughputParams, efficiency
from polluxd.cycle.progress_rates import CONFIRMED, Floats, ProgressRates, Rate, TrainedOn, claimed
from polluxd.model import Report

TOLERANCE = 1.4
"""Ratio of claimed to observed speedup between two numbers of GPUs from which a fit is not believed. Step times that
are off by 10 % make 1.2, and a noise scale that grows within a window makes more."""
STALL_S = 240.0
"""Time without progress after which a job is given no further GPUs. An evaluation, a slow checkpoint and the time
between two reports may take as long together."""
PATIENCE = 2.0
"""A job may take this many times as long as its remaining work says, and `PATIENCE_S` more."""
PATIENCE_S = 120.0
GROWN = 1.05
"""Ratio of remaining samples to those that should remain from which a target has grown."""


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
    gpu_type: str = ""
    """As in `Place`."""
    adaptive: bool = True
    """False: the job's batch size is fixed, whatever its noise scale (`adaptive=no`)."""
    undrained: int = 0
    """Orders to give up GPUs that the job's agent refused, or left unanswered."""

    @property
    def place(self) -> TrainedOn:
        return TrainedOn(self.gpus, self.nodes, self.gpu_type)


_NOTHING = Held(0, 0, 0, 0)


@dataclass(slots=True)
class _ReportHistory:
    """What polluxd has seen of one job."""

    progress: ProgressRates = field(default_factory=ProgressRates)
    attempt: int = -1
    initial: int = 0
    """M0: the unit of progress."""
    target: float | None = None
    """The first one since its user changed it."""
    end: float = math.inf
    """The least progress, in samples over M0, at which the job could end by any report since then."""
    ends_by: float = math.inf
    overdue: bool = False
    """It should have ended by its own account."""
    broken: int = 0
    """How often that came about."""


class Judged(NamedTuple):
    """The reports of jobs, by job, and what polluxd thinks of their claims."""

    reports: dict[int, Report]
    """With doubtful claims replaced."""
    doubts: dict[int, tuple[str, ...]]
    """Claims that polluxd's records contradict."""
    unconfirmed: dict[int, tuple[str, ...]]
    """What polluxd does not count on, without a doubt."""


class TrustedReports:
    """The reports of all jobs, over time."""

    def __init__(self) -> None:
        self._jobs: dict[int, _ReportHistory] = {}

    def trust(self, reports: Mapping[int, Report], held: Mapping[int, Held], now: float) -> Judged:
        """Judge the reports.

        Args:
            reports: the latest of each job; `Report.at` is when it arrived.
            held: polluxd's records; a job that is not named holds nothing.
            now: POSIX seconds.
        """
        judged = Judged({}, {}, {})
        self.observe(reports, held)
        for job_id, report in reports.items():
            history, doubts, unconfirmed = self._jobs[job_id], list[str](), list[str]()
            mine = held.get(job_id, _NOTHING)
            judged.reports[job_id] = _trusted(history, report, mine, now, doubts, unconfirmed)
            if unconfirmed:
                judged.unconfirmed[job_id] = tuple(unconfirmed)
            if doubts:
                judged.doubts[job_id] = tuple(doubts)
        for job_id in self._jobs.keys() - reports.keys():
            del self._jobs[job_id]
        return judged

    def observe(self, reports: Mapping[int, Report], held: Mapping[int, Held]) -> None:
        """Record the jobs' progress, between decisions too; a job that is not named in `held` trains nowhere."""
        for job_id, report in reports.items():
            history, mine = self._jobs.setdefault(job_id, _ReportHistory()), held.get(job_id, _NOTHING)
            if history.attempt != report.attempt:
                _begin_attempt(history, report)
            if history.progress.observe(report, mine.place, adaptive=mine.adaptive):
                # The time that the remaining work may take was reckoned at another speed.
                history.ends_by = math.inf

    def seen(self, job_id: int) -> bool:
        """Tell whether the job's progress at its present size was seen."""
        history = self._jobs.get(job_id)
        return history is not None and history.progress.here() is not None


def _begin_attempt(history: _ReportHistory, report: Report) -> None:
    """Take a new length from the job's user, who may have added epochs or chosen another M0.

    A job that was overdue twice stays so. A move of polluxd begins an attempt, too, and brings no new length.
    """
    other_unit = history.initial != report.limits.initial
    if other_unit:
        # Rates are in its steps.
        history.progress = ProgressRates()
    # By its samples, too: at a larger batch, more of them may make a smaller target.
    before, target = history.target, report.target
    grown = (
        before is not None
        and target is not None
        and (target > GROWN * before or _end(report) > GROWN * history.end)
    )
    if history.broken < 2 and (other_unit or grown):
        history.overdue = False
    if other_unit or grown:
        history.target, history.end, history.ends_by = None, math.inf, math.inf
    history.attempt, history.initial = report.attempt, report.limits.initial


def _trusted(
    history: _ReportHistory,
    report: Report,
    held: Held,
    now: float,
    doubts: list[str],
    unconfirmed: list[str],
) -> Report:
    kept = replace(
        report,
        explored_gpus=min(report.explored_gpus, held.most_gpus),
        explored_nodes=min(report.explored_nodes, held.most_nodes),
    )
    if kept.explored_gpus < report.explored_gpus:
        doubts.append(f"explored_gpus={report.explored_gpus}: the job has held {held.most_gpus} at most")
    kept = _believable_fit(history, _of_known_types(history, kept), held, unconfirmed)
    if held.gpus and report.first_step_at is not None and now - history.progress.advanced_at > STALL_S:
        if 2 * max(kept.explored_gpus, kept.prior_gpus) > held.gpus:
            stalled = now - history.progress.advanced_at
            unconfirmed.append(f"no progress for {stalled:.0f} s, so it gains no GPUs until it goes on")
            kept = replace(kept, most_gpus=held.gpus)
    elif held.equal_share and (
        history.progress.here() is None if held.gpus else not history.progress.newest()
    ):
        # A job that is moved at every decision would otherwise never show a second size to compare with.
        # No doubt is noted: each job passes through this at each new size.
        kept = replace(kept, most_gpus=max(math.ceil(held.equal_share), held.gpus))
    if held.undrained and held.equal_share:
        times = "once" if held.undrained == 1 else f"{held.undrained} times"
        doubts.append(f"it did not give up GPUs, {times}: it has no more than its user's equal share")
        most = math.ceil(held.equal_share)
        kept = replace(kept, most_gpus=most if kept.most_gpus is None else min(kept.most_gpus, most))
    return _believable_target(history, kept, now, doubts, unconfirmed)


def _of_known_types(history: _ReportHistory, report: Report) -> Report:
    """Drop fits that call a GPU type, as Slurm names it, faster where the job never trained on it.

    That its passes are slower there than on the fastest other type the job may say: it could as well ask for that type.
    Where it trained on none yet, the report's own type stands for where it was measured.
    """
    if report.params is None or not (report.params_by_type or report.gpu_type):
        return report
    seen, here = history.progress.types, report.params
    fits = {kind: fit for kind, fit in report.params_by_type.items() if kind in seen}
    passes = [(fit.alpha_grad, fit.beta_grad) for fit in (here, *fits.values())]
    for kind, (alpha, beta, *_) in report.params_by_type.items():
        if any(alpha >= a and beta >= b for a, b in passes):
            fits.setdefault(kind, here._replace(alpha_grad=alpha, beta_grad=beta))
    own = report.gpu_type if report.gpu_type in seen or not seen else history.progress.place.gpu_type
    return replace(report, params_by_type=fits, gpu_type=own)


def _believable_fit(history: _ReportHistory, report: Report, held: Held, unconfirmed: list[str]) -> Report:
    """Replace a claimed fit that observed progress contradicts.

    The new fit comes from the observed progress. Until `CONFIRMED` rates of its present place show the contradiction,
    the job only gains no GPUs. It would never get another rate of a place that it has left.
    """
    if report.params is None:
        return report
    here, rates = history.progress.here(), history.progress.newest(CONFIRMED)
    first = rates if here is None else {**rates, history.progress.place: here}
    if held.gpus and len(rates) < len(first):
        places, _, reached = _reached(first, report, held)
        if any(_contradictions(places, reached)):
            report = replace(report, most_gpus=held.gpus)
    if len(rates) < 2:
        return report
    places, claims, reached = _reached(rates, report, held)
    # At one noise scale, and as they were: as in `_contradictions`, both have to show it.
    now = reached * claims
    bounded = np.array([_physical(places, row) for row in now.tolist()])
    if (bounded < now).any(axis=1).all():
        unconfirmed.append("its progress: a speedup beyond the number of GPUs")
        reached, now = reached * bounded / now, bounded
    for small, large in _contradictions(places, reached):
        claim, was = claims[large] / claims[small], now[0, large] / now[0, small]
        unconfirmed.append(
            f"its fit: {claim:.1f} times the goodput on {places[large].gpus} GPUs as on {places[small].gpus}, "
            f"its progress was {was:.1f} times as fast"
        )
        fit = fit_of({place[:2]: rates[place].steps for place in places}, report)
        # A job that is wrong about its speed is not believed about the time that it needs either.
        return replace(report, params=fit, noise=None, params_by_type={}, target=None)
    for one, other in combinations(range(len(places)), 2):
        lost = reached[:, one] / reached[:, other]
        apart = float(np.maximum(lost, 1 / lost).min())
        if report.params_by_type and places[one].gpu_type != places[other].gpu_type and apart > TOLERANCE:
            unconfirmed.append(
                f"its fits for GPU types {places[one].gpu_type} and {places[other].gpu_type}: "
                f"its progress differs from them by a factor of {apart:.1f}"
            )
            report = replace(report, params_by_type={})
    return report


def _reached(
    rates: Mapping[TrainedOn, Rate], report: Report, held: Held
) -> tuple[list[TrainedOn], Floats, Floats]:
    """Return places, the job's claims there now, and the parts reached [2, places]: of claims then, and of these."""
    places = sorted(rates)
    claims = np.maximum(claimed(report, places, held.adaptive), 1e-12)
    parts = np.array([[rates[p].share for p in places], [rates[p].steps for p in places] / claims])
    return places, claims, parts


def _contradictions(places: Sequence[TrainedOn], reached: Floats) -> Iterator[tuple[int, int]]:
    """Yield pairs of places in which a job reaches less of its claims on more GPUs of a type.

    Both parts have to say so. An honest job falls short of its present claims where its noise scale has grown since,
    and of its claims at that time where it measured its noise scale wrong for some minutes.
    """
    for small, large in combinations(range(len(places)), 2):
        more = places[large].gpus > places[small].gpus and places[small].gpu_type == places[large].gpu_type
        if more and (reached[:, small] > TOLERANCE * reached[:, large]).all():
            yield small, large


def _physical(places: Sequence[TrainedOn], rates: Sequence[float]) -> list[float]:
    """Limit the rates: no speedup exceeds the number of GPUs of a type."""
    bounded: list[float] = []
    for place, rate in zip(places, rates, strict=True):
        below = zip(places, bounded, strict=False)
        most = (TOLERANCE * r * place.gpus / p.gpus for p, r in below if p.gpu_type == place.gpu_type)
        bounded.append(min(rate, min(most, default=math.inf)))
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


def _believable_target(
    history: _ReportHistory, report: Report, now: float, doubts: list[str], unconfirmed: list[str]
) -> Report:
    """Remove remaining work that contradicts the job's history."""
    if report.target is None:
        return report
    left = max(report.target - report.progress, 0.0)
    history.target = report.target if history.target is None else history.target
    end = _end(report)
    grown = report.target > GROWN * history.target and end > GROWN * history.end
    history.end = min(history.end, end)
    if grown:
        doubts.append("remaining work: its target has grown")
        return replace(report, target=None)
    found = history.progress.here()
    rate = None if found is None else found.steps
    if rate is None and report.goodput > 0:
        rate = report.goodput / report.limits.initial
    if rate and history.progress.place.gpus:
        history.ends_by = min(history.ends_by, now + PATIENCE * left / rate + PATIENCE_S)
    if not history.overdue and now > history.ends_by and report.progress < report.target:
        history.overdue = True
        history.broken += 1
    if history.overdue:
        unconfirmed.append("its remaining work: by its own account it should have ended")
        return replace(report, target=None)
    # A training that goes on beyond its target was longer than its user thought: its length is not known.
    return replace(report, target=None) if report.progress >= report.target else report


def _end(report: Report) -> float:
    """Return the progress at which the job ends at the latest: no sample is worth more than one at M0."""
    assert report.target is not None
    return report.progress + max(report.target - report.progress, 0.0) / _worth(report)


def _worth(report: Report) -> float:
    """Return the worth of a sample at the job's batch size against one at M0, by its own noise scale."""
    if report.batch_size <= report.limits.initial:
        return 1.0
    return float(efficiency(report.noise, report.limits.initial, report.batch_size))
