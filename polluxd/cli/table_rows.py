"""Rows of jobs, moves, status and audit, from the store."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from polluxd.model import Allocation, Move, Step
from polluxd.store import JobView, Store

SILENT_S = 300.0
"""A job that holds GPUs for so long without a training step reported is worth a look: imports, data and a first step
take minutes."""

_OVER = {step.value for step in Step if step.terminal}


def job_rows(store: Store, *, ended: bool = True, now: float | None = None) -> list[dict[str, Any]]:
    """Return one row per job, running and waiting jobs first.

    The keys are those of `JOB_COLUMNS` and some more.

    `ended=False` leaves finished jobs out.
    """
    now = time.time() if now is None else now
    lost: dict[int, float] = {}
    for cost in store.move_costs():
        lost[cost["job_id"]] = lost.get(cost["job_id"], 0.0) + cost["total_s"]
    rows = [job_row(view, lost.get(view.job_id, 0.0), now) for view in store.jobs_view(ended=ended)]
    return sorted(rows, key=lambda row: (row["ended_at"] is not None, row["job_id"]))


def job_row(view: JobView, lost_s: float, now: float) -> dict[str, Any]:
    """Return the row of one job; measurements only while it runs."""
    over = view.ended_at is not None
    running = view.gpus > 0 and not over
    done = 1.0 if view.state == "COMPLETED" else view.fraction_done
    moving = view.move_step if view.move_step not in _OVER else None
    return {
        "job_id": view.job_id,
        "name": view.name,
        "user": view.user,
        "account": view.account,
        "partition": view.partition,
        "state": view.state,
        "gpus": view.gpus,
        "nodes": ",".join(view.nodes),
        "min_gpus": view.spec.min_gpus,
        "max_gpus": view.spec.max_gpus,
        "adaptive": view.spec.adaptive,
        "batch_size": view.batch_size if running else None,
        "goodput": view.goodput if running else None,
        "throughput": view.throughput if running else None,
        "speedup": view.speedup if not over else None,
        "mode": view.mode if running else None,
        "advice": view.advice if running else None,
        "progress": done,
        "epoch": view.epoch,
        "moves": view.moves,
        "lost_s": lost_s,
        "moving": moving,
        "attempt": view.attempt,
        "submitted_at": view.submitted_at,
        "started_at": view.started_at,
        "ended_at": view.ended_at,
        "reported_at": view.reported_at,
        "silent_s": None if view.silent_since is None else max(now - view.silent_since, 0.0),
        "age_s": (view.ended_at or now) - view.submitted_at,
        "reason": _reason(view, moving, over),
    }


def _reason(view: JobView, moving: str | None, over: bool) -> str:
    if over:
        return ""
    why = view.decision_reason or ""
    if moving is not None:
        return f"{moving}: {view.move_reason or why}"
    if not why and view.slurm_reason not in ("", "None"):
        return f"Slurm: {view.slurm_reason}"
    return why


def move_rows(store: Store, job_id: int | None = None) -> list[dict[str, Any]]:
    """Return every stored move, oldest first, with its cost at the end."""
    costs = {cost["id"]: cost for cost in store.move_costs(job_id)}
    rows = []
    for move in store.moves(job_id):
        cost = costs.get(move.id)
        rows.append(
            {
                **move_row(move),
                "total_s": cost["total_s"] if cost else None,
                "drained_s": cost["drained_s"] if cost else None,
                "steps": cost["steps"] if cost else {},
            }
        )
    return rows


def move_row(move: Move) -> dict[str, Any]:
    """Return the row of a move, without its cost."""
    return {
        "id": move.id,
        "job_id": move.job_id,
        "attempt": move.attempt,
        "path": move.path,
        "from": str(move.source),
        "to": str(move.target),
        "step": move.step.value,
        "at": move.times.get(Step.PLANNED),
        "times": {step.value: at for step, at in move.times.items()},
        "reason": move.reason,
        "detail": move.detail,
    }


def status_row(store: Store) -> dict[str, Any]:
    """Who leads, what the newest decision was, whether anything moves."""
    leader, cycle, settings = store.leader(), store.latest_cycle(), store.settings()
    allocations = store.allocations(cycle.id) if cycle else []
    return {
        "cluster": store.cluster,
        "leader": leader.holder if leader else None,
        "leading": bool(leader and leader.leased),
        "mode": cycle.mode if cycle else None,
        "paused": settings.paused,
        "cycle": cycle.id if cycle else None,
        "decided_at": cycle.started_at if cycle else None,
        "objective": cycle.objective if cycle else None,
        "gap": cycle.gap if cycle else None,
        "gpu_price": _price(allocations),
        "doubted": _doubted(store, allocations),
        "solver": cycle.solver if cycle else None,
        "note": cycle.note if cycle else None,
        "durations": dict(cycle.durations) if cycle else {},
        "open_moves": len(store.open_moves()),
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
    return [
        {
            "job_id": job.job_id,
            "name": job.name,
            "user": job.user,
            "claims": list(doubts[job.job_id].doubts),
            "reports": doubts[job.job_id].doubted_reports,
        }
        for job in store.jobs_view(ended=False)
        if job.job_id in doubts
    ]


def silent_rows(store: Store) -> list[dict[str, Any]]:
    """Return the jobs that hold GPUs and report no training step."""
    names = ("job_id", "name", "user", "gpus", "silent_s")
    return [{name: row[name] for name in names} for row in job_rows(store, ended=False) if is_silent(row)]


def is_silent(row: Mapping[str, Any]) -> bool:
    """Whether a job has held GPUs for long without a training step."""
    return (row["silent_s"] or 0.0) > SILENT_S


def audit_rows(store: Store) -> list[dict[str, Any]]:
    """Changes of settings, newest first."""
    return [
        {"at": c.at, "who": c.who, "name": c.name, "from": c.from_value, "to": c.to_value}
        for c in store.setting_audit()
    ]
