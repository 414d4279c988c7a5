"""Add remarks to the reasons, on racks and on assumed speeds.

A remark tells which racks a job spans, what one rack would bring, and which speeds are assumed rather than measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pollux.goodput import Goodput
from polluxd.model import Allocation, Explanation, Snapshot, SnapshotJob
from polluxd.policy import fairness, market
from polluxd.policy.domains import is_rack_aware, racks
from polluxd.policy.reasons import count, percent


def add(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """The allocations with remarks where there is something to say."""
    return _of_doubts(snapshot, _of_waits(snapshot, _of_types(snapshot, _of_racks(snapshot, allocations))))


_IN_LINE = ("contention", "fragmentation")
"""What keeps a job from GPUs where it is a matter of time."""
TOLD_S = 60.0
"""A shorter wait is no news."""


def _of_waits(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell how long the jobs without GPUs have waited, and their order."""
    explanations = {a.job_id: a.explanation for a in allocations if not a.placement}
    in_line = {job_id for job_id, why in explanations.items() if why is not None and why.limit in _IN_LINE}
    jobs = [job for job in snapshot.jobs if job.job_id in in_line and not job.placement]
    if not jobs or not snapshot.settings.waiting_power:
        return list(allocations)
    fair = np.array([_at_fair_share(job, explanations[job.job_id]) for job in jobs])
    slower = dict(zip((job.job_id for job in jobs), fairness.slowdowns(jobs, fair).tolist(), strict=True))
    line = sorted(jobs, key=lambda job: (-slower[job.job_id], job.submitted_at, job.job_id))
    text = {}
    for place, job in enumerate(line, start=1):
        waited = fairness.waiting(job)
        if waited < TOLD_S:
            continue
        minutes = f"{waited / 60:.0f} min" if waited < 7200 else f"{waited / 3600:.1f} h"
        known = job.time_limit is not None or math.isfinite(market.work(job)[0])
        times = slower[job.job_id] - 1.0
        length = f", {times:.1f} times its length" if known and times < fairness.MOST_SLOWDOWN - 1.0 else ""
        where = "next in line" if place == 1 else f"number {place} in line"
        text[job.job_id] = f"; has waited {minutes}{length}; {where} for {count(max(job.spec.min_gpus, 1))}"
    return [replace(a, reason=a.reason + text[a.job_id]) if a.job_id in text else a for a in allocations]


def _at_fair_share(job: SnapshotJob, explanation: Explanation | None) -> float:
    """Return the job's goodput on its fair share; nan where it is not known."""
    report = job.report
    if report is None or report.params is None or explanation is None:
        return math.nan
    function = Goodput(report.params, report.noise, report.limits, job.spec.adaptive)
    return float(function.optimize(explanation.fair_nodes, explanation.fair_gpus).goodput)


def _of_doubts(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell which claims of jobs' reports polluxd does not believe."""
    doubted = {job.job_id: job for job in snapshot.jobs if job.doubted_reports}
    return [_with_doubts(a, doubted[a.job_id]) if a.job_id in doubted else a for a in allocations]


def _with_doubts(allocation: Allocation, job: SnapshotJob) -> Allocation:
    explanation, reason = allocation.explanation, allocation.reason
    if explanation is not None:
        explanation = replace(explanation, doubts=job.doubts, doubted_reports=job.doubted_reports)
    if job.doubts:
        reason += f"; polluxd does not believe these claims of its report: {', '.join(job.doubts)}"
    return replace(allocation, reason=reason, explanation=explanation)


def _of_types(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell which jobs hold GPUs of a type that they were not measured on."""
    assumed = {job.job_id: job.report.assumed_types for job in snapshot.jobs if job.report is not None}
    if not any(assumed.values()):
        return list(allocations)
    kind = {n.name: n.gpu_type for n in snapshot.nodes}
    found = []
    for a in allocations:
        here = {kind.get(n, "") for n in a.placement.nodes} & assumed.get(a.job_id, frozenset())
        text = f"; its speed on {' and '.join(sorted(here))} is assumed, not measured" if here else ""
        found.append(replace(a, reason=a.reason + text) if text else a)
    return found


def _of_racks(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell the racks of allocations over several nodes, in text and data.

    Without racks the allocations stay as they are.
    """
    if not racks(snapshot.nodes):
        return list(allocations)
    rack = {n.name: n.rack for n in snapshot.nodes}
    kind = {n.name: n.gpu_type for n in snapshot.nodes}
    jobs = {job.job_id: job for job in snapshot.jobs}
    return [
        _with_rack(a, jobs[a.job_id], sorted({rack.get(n, "") for n in a.placement.nodes}), kind)
        if len(a.placement.nodes) > 1
        else a
        for a in allocations
    ]


def _with_rack(
    allocation: Allocation, job: SnapshotJob, over: Sequence[str], kind: Mapping[str, str]
) -> Allocation:
    names = [name or "unknown" for name in over]
    if len(over) == 1:
        text, together = f"in rack {names[0]}", 0.0
    else:
        named = " and ".join(names) if len(names) == 2 else f"{names[0]} and {len(names) - 1} more"
        text, together = f"over racks {named}", _in_one_rack(allocation, job, kind)
    if together > 0 and allocation.goodput > 0:
        text += f", where one rack would bring {percent(together / allocation.goodput)}"
    explained = allocation.explanation
    return replace(
        allocation,
        reason=f"{allocation.reason}; {text}",
        explanation=None if explained is None else replace(explained, racks=len(over), one_rack=together),
    )


def _in_one_rack(allocation: Allocation, job: SnapshotJob, kind: Mapping[str, str]) -> float:
    """Return the goodput if the same nodes were in one rack.

    It is 0 where the job was not measured over racks.
    """
    report = job.report
    if report is None or report.params is None or not is_rack_aware(job):
        return 0.0
    place = allocation.placement
    fit = report.params_by_type.get(kind.get(place.nodes[0], ""), report.params)
    function = Goodput(fit, report.noise, report.limits, job.spec.adaptive)
    return float(function.optimize(len(place.nodes), place.gpus).goodput)
