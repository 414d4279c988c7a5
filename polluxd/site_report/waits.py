"""How long jobs waited for GPUs, by size, account and hour of the week, and what their limits were worth."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .gpu_hours import DEMANDS, Waits
from .job_log import FINISHED, STATES, JobLog, Numbers

Row = dict[str, Any]

SIZES = ((1, "1 GPU"), (2, "2 to 4"), (5, "5 to 8"), (9, "9 to 32"), (33, "33 and more"))
_LEAST_LIMITS = 20
"""Jobs of a user below which nothing is said of limits."""


def size_names(gpus: Numbers) -> Numbers:
    """Return each job's place in SIZES."""
    return np.searchsorted([least for least, _ in SIZES], gpus, side="right") - 1


def by_group(records: JobLog, waits: Waits, group: Numbers, names: Sequence[str]) -> list[Row]:
    """Return the waits of each group in order of the hours waited.

    They are of all jobs: those that never started, and those that did not wait, included.
    """
    record, seconds = _all(waits)
    mine, tasks = group[record], records.tasks[record]
    weighted = seconds * tasks
    found = []
    for number in np.unique(mine).tolist():
        own = mine == number
        of_all = seconds[own]
        found.append(
            {
                "name": names[number],
                "jobs": int(tasks[own].sum()),
                "median_s": float(np.median(of_all)),
                "p90_s": float(np.quantile(of_all, 0.9)),
                "hours": float(weighted[own].sum() / 3600),
                **{f"while_{name}": share for name, share in where(waits, own[: len(waits.record)]).items()},
            }
        )
    return sorted(found, key=lambda row: (-row["hours"], row["name"]))


def _all(waits: Waits) -> tuple[Numbers, Numbers]:
    """Return the records that waited or did not, and the seconds of each."""
    seconds = np.concatenate([waits.end - waits.begin, np.zeros(len(waits.at_once))])
    return np.concatenate([waits.record, waits.at_once]), seconds


def where(waits: Waits, own: Numbers) -> Mapping[str, float | None]:
    """Return the shares of the waiting time with GPUs idle that would have done elsewhere, and so on."""
    spent = waits.by_demand[own].sum(axis=0)
    whole = spent.sum()
    return {name: float(part / whole) if whole else None for name, part in zip(DEMANDS, spent, strict=True)}


def by_hour(records: JobLog, waits: Waits) -> list[list[float | None]]:
    """Return the mean wait [s] of the jobs that became eligible in each hour of the week: Monday first, 7 x 24.

    Times of a log without a zone are the site's; POSIX times are shown in the zone of this machine.
    """
    record, seconds = _all(waits)
    eligible = records.eligible[record]
    hours, of = np.unique(np.floor(eligible / 3600), return_inverse=True)
    zone = time.gmtime if records.zoned else time.localtime
    moments = [zone(hour * 3600) for hour in hours.tolist()]
    place = np.array([at.tm_wday * 24 + at.tm_hour for at in moments], dtype=np.int64)[of.ravel()]
    count = np.bincount(place, minlength=168)
    total = np.bincount(place, weights=seconds, minlength=168)
    means = [float(s / n) if n else None for s, n in zip(total, count, strict=True)]
    return [means[day * 24 : day * 24 + 24] for day in range(7)]


def limits(records: JobLog) -> Row:
    """Return what completed jobs used of their time limits, and by user the hours that were asked for in vain."""
    done = (records.state == STATES.index(FINISHED)) & ~np.isnan(records.limit) & (records.limit > 0)
    used = ((records.end - records.start) / records.limit)[done]
    users = records.codes["user"][done]
    unused = (records.limit[done] - (records.end - records.start)[done]) * records.gpus[done]
    rows = [
        {
            "name": records.names["user"][user],
            "jobs": int(own.sum()),
            "median_used": float(np.median(used[own])),
            "gpu_hours_unused": float(np.maximum(unused[own], 0).sum() / 3600),
        }
        for user in np.unique(users).tolist()
        if (own := users == user).sum() >= _LEAST_LIMITS
    ]
    return {
        "jobs": len(used),
        "median_used": float(np.median(used)) if len(used) else None,
        "under_a_tenth": float((used < 0.1).mean()) if len(used) else None,
        "users": sorted(rows, key=lambda row: (-row["gpu_hours_unused"], row["name"]))[:20],
    }
