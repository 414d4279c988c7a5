"""What polluxd would have done: its decisions of mode observe, made again, against what the jobs held.

Each decision is judged on the cluster as it was, so nothing that would have followed from it is counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

import numpy as np

from polluxd.model import Plan, Snapshot
from polluxd.policy import decide
from polluxd.store import CycleView

from .job_log import STATES, JobLog

SAMPLES = 200
"""Most decisions that are made again: about a second at 100 jobs."""
BLOCKS = 10
LONGEST_GAP_S = 600.0
"""polluxd did not run in a longer gap between two decisions."""

OBTAINED = (
    "In the shadow: each decision is made again on the cluster as it was, once as decided and once with all jobs left "
    "as they were. Nothing that would have followed from it counts, nor does the cost of moves. An hour trained is one "
    "at the job's fair share"
)

Row = dict[str, Any]


@dataclass(frozen=True)
class Gain:
    """What the decisions would have brought."""

    decisions: int
    """Those that were made again."""
    hours: float
    """For which the decisions stand."""
    held: float
    """Mean over time of the jobs' SPEEDUPs, added up, as they held GPUs; a waiting job's is 0."""
    planned: float
    """The same as polluxd decided."""
    error: float | None
    """Half of the 95 % interval of `planned - held`, from means over blocks of time; None: too few decisions."""

    @property
    def gained_hours(self) -> float:
        """Hours of training, each at a job's fair share, that the decisions would have added."""
        return (self.planned - self.held) * self.hours


def plans(snapshot: Snapshot) -> tuple[Plan, Plan]:
    """Return the plan that leaves each job what it holds, and polluxd's."""
    running = tuple(replace(job, pinned=True, pin_reason="") for job in snapshot.jobs if job.placement)
    return decide(replace(snapshot, jobs=running), explained=False), decide(snapshot, explained=False)


def speedups(pair: Sequence[Plan]) -> tuple[float, float]:
    """Return the sums of the jobs' SPEEDUPs under the two plans."""
    held, planned = (math.fsum(a.speedup for a in plan.allocations) for plan in pair)
    return held, planned


def sampled(cycles: Sequence[CycleView], mode: str) -> list[tuple[CycleView, float]]:
    """Return decisions of a mode with the seconds that each stands for, at most `SAMPLES` of `cycles`, oldest first.

    A decision holds until the next one, whose mode may be another. Each of the sample stands for its neighbours, too.
    """
    lasted = [
        (now, min(later.started_at - now.started_at, LONGEST_GAP_S))
        for now, later in pairwise(cycles)
        if now.mode == mode
    ]
    size = max(1, -(-len(lasted) // SAMPLES))
    groups = [lasted[n : n + size] for n in range(0, len(lasted), size)]
    return [(group[0][0], math.fsum(seconds for _, seconds in group)) for group in groups]


def gain(spans: Sequence[tuple[float, float, float]]) -> Gain | None:
    """Add up decisions: (seconds, speedups held, speedups planned), oldest first. None where no time passed."""
    total = math.fsum(seconds for seconds, _, _ in spans)
    if total <= 0:
        return None
    held, planned = (math.fsum(span[0] * span[n] for span in spans) / total for n in (1, 2))
    size = len(spans) // BLOCKS
    error = None
    if size >= 1:
        blocks = [spans[n * size : (n + 1) * size] for n in range(BLOCKS)]
        means = [fmean(after - before for _, before, after in block) for block in blocks]
        error = 2.262 * stdev(means) / math.sqrt(BLOCKS)  # Student's t, 9 degrees of freedom
    return Gain(len(spans), total / 3600.0, held, planned, error)


def chapter(sample: Sequence[tuple[float, Snapshot]], records: JobLog) -> Row:
    """Return the report's chapter: a row per job, the sum, and its error.

    Args:
        sample: decisions, each with the seconds that it stands for, oldest first.
        records: what happened. A job that is not among them has no name here.
    """
    spans, rows = [], dict[int, Row]()
    for seconds, snapshot in sample:
        held, planned = pair = plans(snapshot)
        spans.append((seconds, *speedups(pair)))
        for job in snapshot.jobs:
            row = rows.setdefault(job.job_id, _begun(job.job_id, records, waits=not job.placement))
            now, then = held.of(job.job_id), planned.of(job.job_id)
            row["hours"] += seconds / 3600
            row["held_gpu_hours"] += seconds * job.placement.gpus / 3600
            row["trained_h"] += seconds * (now.speedup if now else 0.0) / 3600
            if then is not None:
                row["decided_gpu_hours"] += seconds * then.placement.gpus / 3600
                row["decided_h"] += seconds * then.speedup / 3600
                if then.placement and row["seen_waiting"] and row["decided_wait_s"] is None:
                    row["decided_wait_s"] = max(snapshot.taken_at - row["eligible"], 0.0)
    for row in rows.values():
        row["gained_h"] = row["decided_h"] - row["trained_h"]
    found = gain(spans)
    return {
        "jobs": sorted(rows.values(), key=lambda row: (-abs(row["gained_h"]), row["job_id"])),
        "decisions": len(spans),
        "hours": found.hours if found else 0.0,
        "trained_h": found.held * found.hours if found else 0.0,
        "gained_h": found.gained_hours if found else 0.0,
        "error_h": found.error * found.hours if found and found.error is not None else None,
    }


def _begun(job_id: int, records: JobLog, *, waits: bool) -> Row:
    """Return the row of a job, with what accounting has of it."""
    own = (records.job == job_id).nonzero()[0]
    first, last = (own[0], own[-1]) if len(own) else (None, None)
    name, user, state, eligible, waited = "", "", "", math.nan, None
    if first is not None:
        name, user = (records.names[key][records.codes[key][first]] for key in ("name", "user"))
        state, eligible = STATES[int(records.state[last])], float(records.eligible[first])
        waited = None if np.isnan(records.start[first]) else float(records.start[first]) - eligible
    row: Row = {"job_id": job_id, "name": name, "user": user, "state": state, "eligible": eligible}
    row |= {"waited_s": waited, "decided_wait_s": None, "seen_waiting": waits and first is not None}
    return row | dict.fromkeys(
        ("hours", "held_gpu_hours", "decided_gpu_hours", "trained_h", "decided_h"), 0.0
    )


def lines(found: Row | None) -> list[str]:
    """Return what the chapter says in a sentence; none where it was not asked for."""
    if found is None:
        return []
    if not found["decisions"]:
        return ["In the shadow: no decisions of mode observe with their snapshots in this period"]
    error = "too few decisions for an error" if found["error_h"] is None else f"+/- {found['error_h']:.3g} h"
    return [
        f"In the shadow: {found['hours']:.3g} h of decisions in mode observe. {len(found['jobs'])} jobs trained "
        f"{found['trained_h']:.3g} h at their fair shares; polluxd would have changed this by "
        f"{found['gained_h']:+.3g} h ({error}, 95 %), the cost of moves left out"
    ]
