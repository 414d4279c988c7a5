"""What a move cost, from the stamps in its row. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from polluxd.model import Placement, Step

from . import rows
from .views import MoveCost, MoveTotals

# Stamps of one move in the order of events, with the name of the interval that ends there.
_TIMELINE = (
    ("acknowledged", "saving_at", "stop"),
    ("times", Step.CHECKPOINTED, "checkpoint"),
    ("times", Step.REQUEUED, "requeue"),
    ("times", Step.CONFIGURED, "configure"),
    ("times", Step.STARTED, "start"),
    ("resumed", "launched_at", "launch"),
    ("resumed", "imported_at", "import"),
    ("resumed", "rendezvous_at", "rendezvous"),
    ("resumed", "attached_at", "attach"),
    ("resumed", "restored_at", "restore"),
    ("resumed", "first_step_at", "first_step"),
)

MOST_OF_JOB = 200
"""Completed moves of a job that count: the newest."""
_PLACED = (Step.REQUEUED, Step.CONFIGURED, Step.STARTED)
"""Steps of a requeue during which the job does not train, timed by polluxd's clock."""


def is_move(path: str, attempt: int) -> bool:
    """Tell whether a stored move moved a job that had run before.

    A first start moves nothing. The start of a parked job, which ran before, is a move.
    """
    return path != "start" or attempt > 0


def costs_of(found: Iterable[rows.Row]) -> list[MoveCost]:
    """Compute what each completed move cost, split by step; first starts are none."""
    return [
        cost_of(row, rows.placement(row["source"]), rows.placement(row["target"]))
        for row in found
        if is_move(row["path"], row["attempt"])
    ]


def cost_of(row: Mapping[str, Any], source: Placement, target: Placement) -> MoveCost:
    """Compute the cost of a completed move.

    `row` has `times`, `acknowledged` and `resumed` as stored.

    The pause begins at the agent's last step (else at the order to drain, else at the plan). It ends at the first
    step after the move (else when polluxd noticed that step). The times come from the clocks of several machines: an
    interval that would be negative counts as 0, so that the intervals still add up to the pause.

    For a move within the allocation, the agent itself reports the length of its pause: a job that is resized in place
    trains during all other intervals.
    """
    if row["path"] == "resize":
        return _resize_cost(row, source, target)
    stamps = {
        "times": row["times"] or {},
        "acknowledged": row["acknowledged"] or {},
        "resumed": row["resumed"] or {},
    }
    times = stamps["times"]
    saving_at = _saving_at(stamps["acknowledged"], times.get(Step.CHECKPOINTED))
    if saving_at is not None:
        stamps["acknowledged"] = {**stamps["acknowledged"], "saving_at": saving_at}
    last_step = stamps["acknowledged"].get("last_step_at")
    first_step = stamps["resumed"].get("first_step_at")
    ordered = float(times.get(Step.DRAINING, times.get(Step.CONFIGURED, times[Step.PLANNED])))
    over = float(times[Step.TRAINING])
    # A user may claim any time. By polluxd's own clock the job trained up to the order, had no processes between the
    # steps in `placed`, and trained again at `over`.
    placed = [float(times[s]) for s in _PLACED if s in times]
    stopped = float(times.get(Step.CHECKPOINTED, over))
    begin = ordered if last_step is None else min(max(float(last_step), ordered), max(stopped, ordered))
    end = over if first_step is None else min(max([float(first_step), *placed, begin]), over)
    end = max(begin, end)
    at = begin
    steps: dict[str, float] = {}
    for source_of, stamp, name in _TIMELINE:
        seen = stamps[source_of].get(stamp)
        if seen is not None:
            reached = min(max(at, float(seen)), end)
            steps[name] = reached - at
            at = reached
    if at < end:
        steps["first_step"] = steps.get("first_step", 0.0) + end - at
    return {
        "id": int(row["id"]),
        "job_id": int(row["job_id"]),
        "path": str(row["path"]),
        "from": str(source),
        "to": str(target),
        "planned_at": float(times[Step.PLANNED]),
        "total_s": end - begin,
        "drained_s": max(0.0, begin - float(ordered)) if last_step is not None else 0.0,
        "measured": last_step is not None and first_step is not None,
        "steps": steps,
    }


def _resize_cost(row: Mapping[str, Any], source: Placement, target: Placement) -> MoveCost:
    """Compute the cost of a resize in place.

    The pause is the agent's own figure. Without one, it is the time since the last step that the move waited for,
    which is an upper bound.
    """
    times = row["times"]
    reported = (row["resumed"] or {}).get("resize_cost")
    begun = max(float(at) for step, at in times.items() if step != Step.TRAINING)
    longest = max(0.0, float(times[Step.TRAINING]) - float(times[Step.PLANNED]))
    pause = (
        max(0.0, float(times[Step.TRAINING]) - begun) if reported is None else min(float(reported), longest)
    )
    return {
        "id": int(row["id"]),
        "job_id": int(row["job_id"]),
        "path": "resize",
        "from": str(source),
        "to": str(target),
        "planned_at": float(times[Step.PLANNED]),
        "total_s": pause,
        "drained_s": 0.0,
        "measured": reported is not None,
        "steps": {"resize": pause},
    }


def _saving_at(acknowledged: Mapping[str, Any], checkpointed_at: float | None) -> float | None:
    """Return when the agent began to write its checkpoint [POSIX s].

    That is when training stopped, and at the latest the time of the checkpoint less the seconds that writing it took.
    None where the agent reported neither.
    """
    known = [] if (stopped := acknowledged.get("stopped_at")) is None else [float(stopped)]
    if checkpointed_at is not None and "checkpoint_s" in acknowledged:
        known.append(float(checkpointed_at) - float(acknowledged["checkpoint_s"]))
    return min(known, default=None)


def totals(costs: Iterable[MoveCost]) -> dict[int, MoveTotals]:
    """Sums per job, and means per path."""
    by_path: dict[int, dict[str, list[float]]] = {}
    for cost in costs:
        kind = "resize" if cost["path"] == "resize" else "requeue"
        by_path.setdefault(cost["job_id"], {}).setdefault(kind, []).append(cost["total_s"])
    return {
        job_id: MoveTotals(
            sum(len(s) for s in paths.values()),
            sum(sum(s) for s in paths.values()),
            {path: sum(s) / len(s) for path, s in paths.items()},
        )
        for job_id, paths in by_path.items()
    }
