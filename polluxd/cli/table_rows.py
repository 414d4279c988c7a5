"""Rows of jobs, moves, status and audit, from the store, and the columns of their tables."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from polluxd.model import Allocation, Move, Step
from polluxd.store import JobView, Store

from .forecast.foretold import when
from .output import Column, clock, duration, number, plain

_STATE_STYLES = {
    "RUNNING": "green",
    "COMPLETED": "dim",
    "FAILED": "red",
    "CANCELLED": "red",
    "PENDING": "yellow",
}

JOB_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True, least=8),
    Column("user", "USER", rank=7),
    Column("account", "ACCOUNT", rank=11),
    Column("state", "STATE", style=lambda v: _STATE_STYLES.get(v, "")),
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", rank=4, flexible=True, least=8),
    Column("batch_size", "BATCH", right=True, rank=2),
    Column("mode", "MODE", rank=10),
    Column("goodput", "GOODPUT", number(3), right=True, rank=3),
    Column("speedup", "SPEEDUP", number(3), right=True, rank=1),
    Column("progress", "DONE", lambda v: "-" if v is None else f"{100 * v:.0f}%", right=True, rank=5),
    Column("starts_by", "STARTS BY", when, right=True, rank=10),
    Column("ends_from", "ENDS FROM", when, right=True, rank=10),
    Column("ends_by", "ENDS BY", when, right=True, rank=9),
    Column("moves", "MOVES", right=True, rank=6),
    Column("age_s", "AGE", duration, right=True, rank=8),
    Column("reason", "REASON", plain, flexible=True, least=14, rank=9),
)
"""`mode`: what the job's agent may change, as it last reported; `goodput` in examples of M0-equivalent
progress per second; `speedup` against the job's fair share; `progress` a fraction of the declared training; what
is foretold is to hold for four jobs in five."""


def job_columns(rows: Iterable[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns of jobs; those of forecasts only where there is one."""
    told = {key for row in rows for key in _FORETOLD if row.get(key) is not None}
    return tuple(c for c in JOB_COLUMNS if c.key in told or c.key not in _FORETOLD)


_FORETOLD = ("starts_by", "ends_from", "ends_by")


MOVE_COLUMNS = (
    Column("id", "ID", right=True, rank=4),
    Column("job_id", "JOB", right=True),
    Column("at", "WHEN", clock, rank=2),
    Column("path", "PATH", rank=3),
    Column("from", "FROM", flexible=True, least=9),
    Column("to", "TO", flexible=True, least=9),
    Column("step", "STEP", style=lambda v: "red" if v == "failed" else ""),
    Column("total_s", "TOOK", lambda v: "-" if v is None else f"{v:.1f}s", right=True),
    Column(
        "steps",
        "STEPS",
        lambda v: " ".join(f"{k} {s:.1f}" for k, s in (v or {}).items()),
        flexible=True,
        rank=5,
    ),
    Column("reason", "REASON", flexible=True, rank=6),
    Column("detail", "DETAIL", flexible=True, rank=7),
)

SILENT_S = 300.0
"""A job that holds GPUs for so long without a training step reported is worth a look: imports, data and a first step
take minutes."""

_OVER = {step.value for step in Step if step.terminal}


def job_rows(store: Store, *, ended: bool = True) -> list[dict[str, Any]]:
    """Return one row per job, running and waiting jobs first. `ended=False` leaves finished jobs out."""
    now, lost = time.time(), lost_seconds(store, ended=ended)
    rows = [job_row(view, lost.get(view.job_id, 0.0), now) for view in store.jobs_view(ended=ended)]
    return sorted(rows, key=job_order)


def lost_seconds(store: Store, *, ended: bool = True) -> Mapping[int, float]:
    """Return the training that moves have cost, by job [s]."""
    lost: dict[int, float] = defaultdict(float)
    for cost in store.move_costs(ended=ended):
        lost[cost["job_id"]] += cost["total_s"]
    return lost


def job_order(row: Mapping[str, Any]) -> tuple[bool, int]:
    """Put running and waiting jobs first."""
    return row["ended_at"] is not None, row["job_id"]


def job_row(view: JobView, lost_s: float, now: float) -> dict[str, Any]:
    """Return the row of one job; measurements only while it runs."""
    over = view.ended_at is not None
    running = view.gpus > 0 and not over
    moving = view.move_step if view.move_step not in _OVER else None
    return {
        **{key: getattr(view, key) for key in _AS_STORED},
        **{key: getattr(view, key) if running else None for key in _WHILE_RUNNING},
        **{key: getattr(view.spec, key) for key in ("min_gpus", "max_gpus", "adaptive")},
        "nodes": ",".join(view.nodes),
        # Nothing is predicted of what was never measured.
        "speedup": view.speedup if not over and view.reported_at is not None else None,
        "progress": 1.0 if view.state == "COMPLETED" else view.fraction_done,
        "lost_s": lost_s,
        "moving": moving,
        "silent_s": None if view.silent_since is None else max(now - view.silent_since, 0.0),
        "age_s": (view.ended_at or now) - view.submitted_at,
        "reason": _reason(view, moving, over),
    }


_AS_STORED = (
    "job_id", "name", "user", "account", "partition", "state", "gpus", "epoch", "moves", "attempt", "submitted_at",
    "started_at", "ended_at", "reported_at",
)  # fmt: skip
_WHILE_RUNNING = ("batch_size", "goodput", "throughput", "mode", "advice")


def _reason(view: JobView, moving: str | None, over: bool) -> str:
    if over:
        return ""
    why = view.decision_reason or ""
    if moving is not None:
        return f"{moving}: {view.move_reason or why}"
    if view.left_alone:
        return f"left alone: {view.left_alone}"
    if not why and view.slurm_reason not in ("", "None"):
        return f"Slurm: {view.slurm_reason}"
    return why


def move_rows(store: Store, job_id: int | None = None) -> list[dict[str, Any]]:
    """Return every stored move, oldest first, with its cost at the end."""
    costs = {cost["id"]: cost for cost in store.move_costs(job_id)}
    rows = []
    for move in store.moves(job_id):
        cost: Mapping[str, Any] = costs.get(move.id, {"total_s": None, "drained_s": None, "steps": {}})
        rows.append(move_row(move) | {key: cost[key] for key in ("total_s", "drained_s", "steps")})
    return rows


def move_row(move: Move) -> dict[str, Any]:
    """Return the row of a move, without its cost."""
    return {
        **{key: getattr(move, key) for key in ("id", "job_id", "attempt", "path", "reason", "detail")},
        "from": str(move.source),
        "to": str(move.target),
        "step": move.step.value,
        "at": move.times.get(Step.PLANNED),
        "times": {step.value: at for step, at in move.times.items()},
    }


def status_row(store: Store) -> dict[str, Any]:
    """Who leads, what the newest decision was, whether anything moves."""
    leader, cycle = store.leader(), store.latest_cycle()
    allocations = store.allocations(cycle.id) if cycle else []
    return {
        **{key: getattr(cycle, key, None) for key in ("mode", "objective", "gap", "solver", "note")},
        "cluster": store.cluster,
        "leader": leader.holder if leader else None,
        "leading": bool(leader and leader.leased),
        "trouble": leader.trouble if leader else "",
        "paused": store.settings().paused,
        "cycle": cycle.id if cycle else None,
        "decided_at": cycle.started_at if cycle else None,
        "gpu_price": _price(allocations),
        "doubted": _doubted(store, allocations),
        "durations": dict(cycle.durations) if cycle else {},
        "open_moves": len(store.open_moves()),
        "reported": store.reported(),
    }


def _price(allocations: Iterable[Allocation]) -> float | None:
    """Return the highest price of a GPU; None under fair share."""
    explained = (a.explanation.gpu_price for a in allocations if a.explanation is not None)
    return max((price for price in explained if price is not None), default=None)


def _doubted(store: Store, allocations: Iterable[Allocation]) -> list[dict[str, Any]]:
    """Return jobs with claims that polluxd did not believe at last."""
    doubts = {a.job_id: a.explanation for a in allocations if a.explanation and a.explanation.doubts}
    if not doubts:
        return []
    named = ("job_id", "name", "user")
    return [
        {key: getattr(job, key) for key in named} | {"claims": list(facts.doubts)}
        for job in store.jobs_view(ended=False)
        if (facts := doubts.get(job.job_id)) is not None
    ]


def is_silent(row: Mapping[str, Any]) -> bool:
    """Whether a job has held GPUs for long without a training step."""
    return (row["silent_s"] or 0.0) > SILENT_S
