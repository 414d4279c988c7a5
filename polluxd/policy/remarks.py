"""Add remarks to the reasons, on racks and on assumed speeds.

A remark tells which racks a job spans, what one rack would bring, and which speeds are assumed rather than measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pollux.goodput import Goodput
from polluxd.model import Allocation, Snapshot, SnapshotJob
from polluxd.policy.domains import racks, tells_racks
from polluxd.policy.reasons import percent


def add(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """The allocations with remarks where there is something to say."""
    return _of_doubts(snapshot, _of_types(snapshot, _of_racks(snapshot, allocations)))


def _of_doubts(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell which claims of jobs' reports polluxd does not believe."""
    doubted = {job.job_id: job for job in snapshot.jobs if job.doubted_reports}
    return [_with_doubts(a, doubted[a.job_id]) if a.job_id in doubted else a for a in allocations]


def _with_doubts(allocation: Allocation, job: SnapshotJob) -> Allocation:
    told, reason = allocation.explanation, allocation.reason
    if told is not None:
        told = replace(told, doubts=job.doubts, doubted_reports=job.doubted_reports)
    if job.doubts:
        reason += f"; polluxd does not believe these claims of its report: {', '.join(job.doubts)}"
    return replace(allocation, reason=reason, explanation=told)


def _of_types(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell which jobs hold GPUs of a type that they were not measured on."""
    assumed = {job.job_id: job.report.assumed_types for job in snapshot.jobs if job.report is not None}
    if not any(assumed.values()):
        return list(allocations)
    kind = {n.name: n.gpu_type for n in snapshot.nodes}
    found = []
    for a in allocations:
        here = {kind.get(n, "") for n in a.placement.nodes} & assumed.get(a.job_id, frozenset())
        words = f"; its speed on {' and '.join(sorted(here))} is assumed, not measured" if here else ""
        found.append(replace(a, reason=a.reason + words) if words else a)
    return found


def _of_racks(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell the racks of allocations over several nodes, in words and data.

    Without racks the allocations stay as they are.
    """
    if not racks(snapshot.nodes):
        return list(allocations)
    rack = {n.name: n.rack for n in snapshot.nodes}
    kind = {n.name: n.gpu_type for n in snapshot.nodes}
    jobs = {job.job_id: job for job in snapshot.jobs}
    return [
        _told(a, jobs[a.job_id], sorted({rack.get(n, "") for n in a.placement.nodes}), kind)
        if len(a.placement.nodes) > 1
        else a
        for a in allocations
    ]


def _told(
    allocation: Allocation, job: SnapshotJob, over: Sequence[str], kind: Mapping[str, str]
) -> Allocation:
    names = [name or "unknown" for name in over]
    if len(over) == 1:
        words, together = f"in rack {names[0]}", 0.0
    else:
        named = " and ".join(names) if len(names) == 2 else f"{names[0]} and {len(names) - 1} more"
        words, together = f"over racks {named}", _in_one_rack(allocation, job, kind)
    if together > 0 and allocation.goodput > 0:
        words += f", where one rack would bring {percent(together / allocation.goodput)}"
    explained = allocation.explanation
    return replace(
        allocation,
        reason=f"{allocation.reason}; {words}",
        explanation=None if explained is None else replace(explained, racks=len(over), one_rack=together),
    )


def _in_one_rack(allocation: Allocation, job: SnapshotJob, kind: Mapping[str, str]) -> float:
    """Return the goodput if the same nodes were in one rack.

    It is 0 where the job was not measured over racks.
    """
    report = job.report
    if report is None or report.params is None or not tells_racks(job):
        return 0.0
    place = allocation.placement
    fit = report.params_by_type.get(kind.get(place.nodes[0], ""), report.params)
    function = Goodput(fit, report.noise, report.limits, job.spec.adaptive)
    return float(function.optimize(len(place.nodes), place.gpus).goodput)
