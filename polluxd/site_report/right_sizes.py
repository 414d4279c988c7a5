"""Right sizes: the same training at several numbers of GPUs is an experiment that nobody planned.

Trainings are the same by user, account and job name without digits (sacct keeps no script before Slurm 21.08). A
speedup is a ratio of geometric means of elapsed times of completed jobs, with Welch's interval on logarithms. It says
nothing where users also changed what they trained: hence the interval, and the names beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy import stats

from .job_log import FINISHED, STATES, JobLog, Numbers

Row = dict[str, Any]

LEAST_JOBS = 3
"""Of one size, for a mean with an interval."""
SHORTEST_S = 60.0
"""Shorter jobs are starts that ended at once."""
CONFIDENCE = 0.95
EFFICIENT = 0.5


def experiments(records: JobLog, period: tuple[float, float]) -> list[Row]:
    """Return each training that ran at several sizes: a row per larger size, beside its smallest one.

    `gpu_hours`: of the completed jobs of this size, in the period. `past_half`: the efficiency is below a half, as far
    as the interval reaches.
    """
    since, until = period
    elapsed = records.end - records.start
    done = (records.state == STATES.index(FINISHED)) & (elapsed >= SHORTEST_S)
    inside = np.clip(records.end, since, until) - np.clip(records.start, since, until)
    named = [
        np.array([bool(name) for name in records.names[key]])[records.codes[key]] for key in ("user", "name")
    ]
    kept = np.flatnonzero(done & (inside > 0) & named[0] & named[1])
    keys = np.stack([records.codes[key][kept] for key in ("user", "account", "name")])
    groups, of = np.unique(keys, axis=1, return_inverse=True)
    order = np.lexsort((records.gpus[kept], of.ravel()))
    bounds = np.searchsorted(of.ravel()[order], np.arange(groups.shape[1] + 1))
    found = []
    for number in np.flatnonzero(np.diff(bounds) >= 2 * LEAST_JOBS).tolist():
        own = kept[order[bounds[number] : bounds[number + 1]]]
        sizes, counts = np.unique(records.gpus[own], return_counts=True)
        sizes = sizes[counts >= LEAST_JOBS]
        if len(sizes) < 2:
            continue
        user, account, name = groups[:, number].tolist()
        base = np.log(elapsed[own[records.gpus[own] == sizes[0]]])
        for size in sizes[1:].tolist():
            mine = own[records.gpus[own] == size]
            middle, low, high = ratio(base, np.log(elapsed[mine]))
            more = size / sizes[0]
            found.append(
                {
                    "user": records.names["user"][user],
                    "account": records.names["account"][account],
                    "name": records.names["name"][name],
                    "from_gpus": int(sizes[0]),
                    "gpus": int(size),
                    "jobs": [len(base), len(mine)],
                    "speedup": middle,
                    "low": low,
                    "high": high,
                    "efficiency": middle / more,
                    "past_half": high / more < EFFICIENT,
                    "gpu_hours": float((inside[mine] * size).sum() / 3600),
                }
            )
    return sorted(found, key=lambda row: (-row["gpu_hours"], row["user"], row["name"], row["gpus"]))


def ratio(few: Numbers, many: Numbers) -> tuple[float, float, float]:
    """Return the ratio of two geometric means, and its interval: of logarithms, by Welch's t."""
    middle = float(few.mean() - many.mean())
    parts = [values.var(ddof=1) / len(values) for values in (few, many)]
    error = float(np.sqrt(sum(parts)))
    if error == 0.0:
        return (float(np.exp(middle)),) * 3
    freedom = sum(parts) ** 2 / sum(
        part**2 / (len(values) - 1) for part, values in zip(parts, (few, many), strict=True)
    )
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    low, high = np.exp(np.clip([middle - reach, middle + reach], -50, 50))
    return float(np.exp(middle)), float(low), float(high)


def past_half(rows: list[Row]) -> list[Row]:
    """Return the GPU hours at sizes that are surely below half of linear speedup, by user."""
    hours: dict[str, float] = {}
    for row in rows:
        if row["past_half"]:
            hours[row["user"]] = hours.get(row["user"], 0.0) + row["gpu_hours"]
    return [
        {"name": user, "gpu_hours": hours[user]}
        for user in sorted(hours, key=lambda user: (-hours[user], user))
    ]
