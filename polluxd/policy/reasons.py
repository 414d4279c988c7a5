"""The reason for a job's placement, in one sentence for its user.

Remarks follow it: which racks a job spans and what one rack would bring, which speeds are assumed rather than measured,
how long a job has waited, and which claims of its report polluxd does not believe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pollux.goodput import Goodput
from polluxd.model import Allocation, Explanation, Placement, Snapshot, SnapshotJob
from polluxd.policy import market, worth
from polluxd.policy.domains import is_rack_aware, racks
from polluxd.policy.feasible import measured_on

_IN_LINE = ("contention", "fragmentation")
"""What keeps a job from GPUs where it is a matter of time."""
TOLD_S = 60.0
"""A shorter wait is no news."""


class Facts(NamedTuple):
    """What the reason of a job that takes part follows from."""

    job: SnapshotJob
    place: Placement
    """What it gets."""
    why: Explanation
    speedup: float
    goodput: float
    before: float
    """Goodput at its present placement; 0 if it cannot stay there."""
    most: int
    """GPUs that its measurements and its progress allow."""
    free: int
    """Unused GPUs that it could use."""
    ceiling: tuple[str, int | None]
    """The ceilings that are reached, in words (`account lab and user ada`); the GPUs of one below what it needs."""


def count(gpus: int) -> str:
    """Write a number of GPUs: `1 GPU`, `2 GPUs`."""
    return f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"


def where(placement: Placement) -> str:
    """Name the nodes, short enough for a table: `n1`, or `n1 and 3 more`."""
    if len(placement.nodes) <= 2:
        return " and ".join(placement.nodes)
    return f"{placement.nodes[0]} and {len(placement.nodes) - 1} more"


def percent(ratio: float) -> str:
    """Write a ratio as a change: 1.5 becomes `+50 %`."""
    change = (ratio - 1.0) * 100.0
    return f"{change:+.0f} %" if abs(change) < 1000 else f"x{ratio:.0f}"


def of(facts: Facts) -> str:
    """Say what happens to the job, and why it does not get more GPUs."""
    groups, most = facts.ceiling
    if facts.why.limit == "ceiling" and most is not None:
        why = (
            f"infeasible: the job needs at least {count(facts.why.next_gpus or 0)}, and the ceiling of {groups} is "
            f"{count(most)}"
        )
        return f"{_change(facts)}; {why}" if facts.job.placement else why
    return f"{_change(facts)}; {_why_not_more(facts)}"


def of_pinned(job: SnapshotJob) -> str:
    """Say why this plan leaves the job as it is."""
    reason = job.pin_reason or ("not preemptible" if not job.spec.preemptible else "pinned")
    if not job.placement:
        return f"waits: {reason}"
    return f"keeps {count(job.placement.gpus)} on {where(job.placement)}: {reason}"


def _change(facts: Facts) -> str:
    now, place = facts.job.placement, facts.place
    measured = facts.job.report is not None and facts.job.report.params is not None
    speed = f", {facts.speedup:.2f} times its fair share" if measured else ""
    if not place:
        return f"parked, gives up {count(now.gpus)}" if now else "waits for GPUs"
    there = f"{count(place.gpus)} on {where(place)}"
    if not now:
        return f"{'restarts' if facts.job.started else 'starts'} with {there}{speed}"
    if place == now:
        return f"keeps {there}{speed}"
    gained = f", goodput {percent(facts.goodput / facts.before)}" if measured and facts.before > 0 else ""
    if place.gpus == now.gpus:
        return f"moves from {where(now)} to {there}{gained}"
    verb = "grows" if place.gpus > now.gpus else "shrinks"
    return f"{verb} from {now.gpus} to {there}{gained}"


def _why_not_more(facts: Facts) -> str:
    why = facts.why
    if not why.next_gpus:
        return _own_limit(facts)
    report = facts.job.report
    if facts.place and (report is None or report.params is None):
        gain = f"{count(why.next_gpus)} would be possible"
    elif facts.place:
        gain = f"{count(why.next_gpus)} would bring {percent(why.next_goodput / facts.goodput)}"
    else:
        gain = f"it needs at least {count(why.next_gpus)}"
    if why.limit == "move-cost":
        return f"{gain}, less than the move would cost"
    if why.limit == "ceiling":
        return f"{gain}, but the ceiling of {facts.ceiling[0]} is reached"
    if why.limit == "fragmentation":
        return f"{gain}, but the {count(facts.free)} that are free for it do not form such a placement"
    closest = "" if why.taken_by is None else f"; those of job {why.taken_by} come closest"
    return f"{gain}, but every GPU is worth more elsewhere{closest}"


def _own_limit(facts: Facts) -> str:
    kind, job, most, held = facts.why.limit, facts.job, facts.most, facts.place.gpus
    spec = job.spec
    if kind == "goodput":
        return "more GPUs would not raise its goodput"
    if kind == "max-gpus":
        assert spec.max_gpus is not None
        bound = job.max_gpus_rule or f"max-gpus={spec.max_gpus}"
        if held >= spec.max_gpus:
            return f"{bound} allows no more"
        between = (
            count(spec.max_gpus) if held + 1 == spec.max_gpus else f"{held + 1} to {count(spec.max_gpus)}"
        )
        return f"no placement of {between} is possible, and {bound} allows no more"
    if kind == "batch":
        barred = job.report.barred if job.report is not None else ""
        return barred or "its batch limits allow no more GPUs"
    if kind == "progress":
        here = f" on its {count(job.placement.gpus)}" if job.placement else ""
        return f"polluxd has yet to see progress{here}, so at most {most} until then"
    if kind == "exploration":
        if (measured := measured_on(job)) == 0:
            if job.report is None and spec.own_size:
                return "not measured yet, so it keeps the size that its user asked for"
            if most > spec.min_gpus:
                return f"not measured yet, so at most {count(most)} now"
            return f"not measured yet, so it begins with min-gpus={spec.min_gpus}"
        return f"measured on at most {count(measured)} so far, so at most {most} now"
    if kind == "counts":
        return f"no placement of more than {count(held)} has a count that gpu-counts allows"
    memory = f" with {spec.mem_per_gpu_mb} MB of memory each" if spec.mem_per_gpu_mb else ""
    return f"no placement of more than {count(held)}{memory} is possible on the nodes in service"


def with_remarks(
    snapshot: Snapshot, allocations: Sequence[Allocation], fair: Mapping[int, float]
) -> list[Allocation]:
    """The allocations with remarks where there is something to say; `fair`: goodput at the fair share, by job."""
    found = _of_types(snapshot, _of_racks(snapshot, allocations))
    return _of_doubts(snapshot, _of_waits(snapshot, found, fair))


def _of_waits(
    snapshot: Snapshot, allocations: Sequence[Allocation], fair: Mapping[int, float]
) -> list[Allocation]:
    """Tell how long the jobs without GPUs have waited, and their order."""
    explanations = {a.job_id: a.explanation for a in allocations if not a.placement}
    in_line = {job_id for job_id, why in explanations.items() if why is not None and why.limit in _IN_LINE}
    jobs = [job for job in snapshot.jobs if job.job_id in in_line and not job.placement]
    if not jobs or not snapshot.settings.waiting_power:
        return list(allocations)
    slowdowns = worth.slowdowns(jobs, np.array([fair[job.job_id] for job in jobs]))
    slower = dict(zip((job.job_id for job in jobs), slowdowns.tolist(), strict=True))
    line = sorted(jobs, key=lambda job: (-slower[job.job_id], job.submitted_at, job.job_id))
    text = {}
    for place, job in enumerate(line, start=1):
        waited = worth.waiting(job)
        if waited < TOLD_S:
            continue
        minutes = f"{waited / 60:.0f} min" if waited < 7200 else f"{waited / 3600:.1f} h"
        known = job.time_limit is not None or math.isfinite(market.work(job)[0])
        times = slower[job.job_id] - 1.0
        length = f", {times:.1f} times its length" if known and times < worth.MOST_SLOWDOWN - 1.0 else ""
        where = "next in line" if place == 1 else f"number {place} in line"
        text[job.job_id] = f"; has waited {minutes}{length}; {where} for {count(max(job.spec.min_gpus, 1))}"
    return [replace(a, reason=a.reason + text[a.job_id]) if a.job_id in text else a for a in allocations]


def _of_doubts(snapshot: Snapshot, allocations: Sequence[Allocation]) -> list[Allocation]:
    """Tell which claims of jobs' reports polluxd does not believe, or not yet."""
    doubted = {job.job_id: job for job in snapshot.jobs if job.doubts or job.unconfirmed}
    return [_with_doubts(a, doubted[a.job_id]) if a.job_id in doubted else a for a in allocations]


def _with_doubts(allocation: Allocation, job: SnapshotJob) -> Allocation:
    explanation, reason = allocation.explanation, allocation.reason
    if explanation is not None:
        explanation = replace(explanation, doubts=job.doubts)
    if job.doubts:
        reason += f"; polluxd does not believe these claims of its report: {', '.join(job.doubts)}"
    if job.unconfirmed:
        reason += f"; not confirmed yet: {', '.join(job.unconfirmed)}"
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
        explanation=None if explained is None else replace(explained, racks=len(over)),
    )


def _in_one_rack(allocation: Allocation, job: SnapshotJob, kind: Mapping[str, str]) -> float:
    """Return the goodput if the same nodes were in one rack.

    It is 0 where the job was not measured over racks.
    """
    report = job.report
    if report is None or report.params is None or not is_rack_aware(job):
        return 0.0
    place = allocation.placement
    own = kind.get(place.nodes[0], "")
    fit = report.params_by_type.get(own, report.params)
    function = Goodput(fit, report.noise, report.limits_on(own), job.spec.adaptive)
    return float(function.optimize(len(place.nodes), place.gpus).goodput)
