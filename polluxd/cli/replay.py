"""Compare a plan, made again, with the recorded plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from polluxd.model import Allocation, Plan
from polluxd.store import CycleView
from polluxd.store.decision_changes import plan_digest, same_decision

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
