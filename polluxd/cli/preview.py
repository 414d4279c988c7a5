"""Two decisions on one snapshot, under different settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

from polluxd.config.setting_info import policy_document
from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError
from polluxd.model import Allocation, Plan, Snapshot
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy import decide
from polluxd.policy.cloud.prices import hourly
from polluxd.store import Store

from .output import Column, duration, number
from .setting_words import Given, changes


def _ends(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


PREVIEW_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True, least=8, rank=3),
    Column("user", "USER", rank=4),
    Column("account", "ACCOUNT", rank=2),
    Column("gpus_now", "NOW", right=True, rank=1),
    Column("gpus_before", "BEFORE", right=True),
    Column("gpus_after", "AFTER", right=True),
    Column("speedup_before", "SPEEDUP", number(3), right=True),
    Column("speedup_after", "SPEEDUP AFTER", number(3), right=True),
    Column("seconds_left_before", "ENDS IN", _ends, right=True, rank=6),
    Column("seconds_left_after", "ENDS IN AFTER", _ends, right=True, rank=6),
    Column("reason_after", "REASON", flexible=True, least=14, rank=5),
)

Side = dict[str, Any]


def previewed(store: Store, defaults: PolicySettings, options: Mapping[str, Given | None]) -> dict[str, Any]:
    """Return what `polluxctl settings preview` shows. Nothing is changed.

    Raises:
        ConfigError: no option is given, or a value cannot be used.
        PolluxError: no decision is stored.
    """
    present = store.settings(defaults)
    proposed = replace(present, **changes(options, present))
    newest = store.newest_snapshot()
    if newest is None:
        raise PolluxError("no snapshot is stored yet: polluxd stores one with each decision")
    cycle, data = newest
    jobs, (before, after) = preview(decode_snapshot(data), present, proposed)
    return {
        "cycle": cycle,
        "settings_before": policy_document(present),
        "settings_after": policy_document(proposed),
        "before": before,
        "after": after,
        "jobs": jobs,
    }


def preview(
    snapshot: Snapshot, before: PolicySettings, after: PolicySettings
) -> tuple[list[dict[str, Any]], list[Side]]:
    """Return a row per job, and a summary of each of the two plans."""
    plans = [decide(replace(snapshot, settings=settings)) for settings in (before, after)]
    old, new = ({a.job_id: a for a in plan.allocations} for plan in plans)
    rows = []
    for job in snapshot.jobs:
        was, will = old[job.job_id], new[job.job_id]
        rows.append(
            {
                "job_id": job.job_id,
                "name": job.name,
                "user": job.user,
                "account": job.account,
                "gpus_now": job.placement.gpus,
                "gpus_before": was.placement.gpus,
                "gpus_after": will.placement.gpus,
                "placement_before": str(was.placement),
                "placement_after": str(will.placement),
                "speedup_before": was.speedup,
                "speedup_after": will.speedup,
                "seconds_left_before": _seconds_left(was),
                "seconds_left_after": _seconds_left(will),
                "reason_before": was.reason,
                "reason_after": will.reason,
            }
        )
    return rows, [
        summary(plan) | {"rented_cost": hourly(replace(snapshot, settings=settings), plan)}
        for plan, settings in zip(plans, (before, after), strict=True)
    ]


def _seconds_left(allocation: Allocation) -> float | None:
    """Return the predicted seconds to a job's end.

    None: the job declared no length, or it is not known when it gets GPUs.
    """
    return allocation.explanation.seconds_left if allocation.explanation is not None else None


def summary(plan: Plan) -> Side:
    """Of one plan: how well it does by all, and how much it would move."""
    speedups = [a.speedup for a in plan.allocations]
    return {
        "mean_speedup": fmean(speedups) if speedups else None,
        "least_speedup": min(speedups, default=None),
        "running": sum(bool(a.placement) for a in plan.allocations),
        "gpus": sum(a.placement.gpus for a in plan.allocations),
        "to_change": sum(a.changed for a in plan.allocations),
        "objective": plan.objective,
        "gap": plan.gap,
    }


def sentences(before: Side, after: Side) -> list[str]:
    show = number(3)
    return [
        f"{title}: {show(before[key])} before, {show(after[key])} after"
        if "speedup" in key
        else f"{title}: {before[key]} before, {after[key]} after"
        for key, title in (
            ("mean_speedup", "mean speedup"),
            ("least_speedup", "least speedup"),
            ("running", "jobs with GPUs"),
            ("gpus", "GPUs held"),
            ("to_change", "jobs to start, move or stop"),
            ("rented_cost", "cost of the rented nodes in use, per hour"),
        )
    ]
