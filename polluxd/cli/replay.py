"""Decide again on stored snapshots: compare with the recorded plan, or with the GPUs that jobs hold. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import fmean, stdev
from typing import Any

from polluxd.model import Allocation, Plan, Snapshot
from polluxd.policy import decide
from polluxd.store import CycleView
from polluxd.store.written import plan_digest, same_decision

from .output import Column, plain

DIFFERENCE_COLUMNS = (
    Column("job_id", "JOB", lambda v: "(plan)" if v is None else str(v), right=True),
    Column("what", "WHAT"),
    Column("recorded", "RECORDED", plain, flexible=True, least=20),
    Column("replayed", "REPLAYED", plain, flexible=True, least=20),
)

Difference = dict[str, Any]


def differences(
    cycle: CycleView, recorded: Sequence[Allocation], plan: Plan, made: Sequence[Allocation] | None = None
) -> list[Difference]:
    """Return all differences: of the plan (`job_id` None), then by job.

    Numbers are the same only with all their bits the same. Decisions that are not among `made` were recorded in an
    earlier cycle: the digest of the plan stands for their numbers.
    """
    exact = {a.job_id for a in (recorded if made is None else made)}
    found = [
        _difference(None, what, before, after)
        for what, before, after in (
            ("objective", cycle.objective, _finite(plan.objective)),
            ("upper bound", cycle.upper_bound, _finite(plan.upper_bound)),
            ("solver", cycle.solver, plan.solver),
        )
        if before != after
    ]
    before, after = ({a.job_id: a for a in side} for side in (recorded, plan.allocations))
    for job_id in sorted(before.keys() | after.keys()):
        if job_id not in before or job_id not in after:
            found.append(_difference(job_id, "decision", *(_presence(job_id in s) for s in (before, after))))
        elif job_id in exact or not same_decision(before[job_id], after[job_id]):
            found += _of_job(before[job_id], after[job_id])
    digest = plan_digest(plan.allocations)
    if not found and cycle.plan_digest not in (None, digest):
        found.append(_difference(None, "digest of all decisions", cycle.plan_digest, digest))
    return found


def _of_job(recorded: Allocation, replayed: Allocation) -> Iterator[Difference]:
    left, right = _values(recorded), _values(replayed)
    for what in {**left, **right}:
        # Cycles of the first versions have no explanation as data: that is no difference.
        comparable = recorded.explanation is not None or what in left
        if comparable and left.get(what) != right.get(what):
            yield _difference(recorded.job_id, what, left.get(what), right.get(what))


def _values(allocation: Allocation) -> dict[str, Any]:
    """Flatten a decision as the database keeps it; not finite is 0."""
    values: dict[str, Any] = {
        "placement": str(allocation.placement),
        "goodput": allocation.goodput,
        "speedup": allocation.speedup,
        "batch size": allocation.batch_size,
        "changed": allocation.changed,
        "reason": allocation.reason,
    }
    if allocation.explanation is not None:
        values |= {f"explanation: {name}": v for name, v in asdict(allocation.explanation).items()}
    return {k: 0.0 if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _presence(present: bool) -> str:
    return "made" if present else "none"


def _difference(job_id: int | None, what: str, recorded: Any, replayed: Any) -> Difference:
    return {"job_id": job_id, "what": what, "recorded": recorded, "replayed": replayed}


SAMPLES = 200
"""Most decisions that are made again: about a second at 100 jobs."""
BLOCKS = 10
LONGEST_GAP_S = 600.0
"""polluxd did not run in a longer gap between two decisions."""


@dataclass(frozen=True)
class Gain:
    """What the decisions would have brought."""

    decisions: int
    hours: float
    """Covered by the decisions."""
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


def speedups(snapshot: Snapshot) -> tuple[float, float]:
    """Return the sum of the jobs' SPEEDUPs with the GPUs that they hold, and as decided."""
    running = tuple(replace(job, pinned=True, pin_reason="") for job in snapshot.jobs if job.placement)
    held, planned = (decide(each, explained=False) for each in (replace(snapshot, jobs=running), snapshot))
    return tuple(math.fsum(a.speedup for a in plan.allocations) for plan in (held, planned))  # type: ignore[return-value]


def gain(decided: Sequence[tuple[float, float, float]]) -> Gain | None:
    """Add up decisions: (POSIX time, speedups held, speedups planned), oldest first. None for fewer than two."""
    spans = [(min(later[0] - now[0], LONGEST_GAP_S), now[1], now[2]) for now, later in pairwise(decided)]
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
    return Gain(len(decided), total / 3600.0, held, planned, error)
