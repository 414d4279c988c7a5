"""The columns of tables of jobs (`polluxctl jobs`, `polluxctl top`, the demo) and of moves."""

from __future__ import annotations

from typing import Any

from .output import Column, clock, duration, number, plain

_STATE_STYLES = {
    "RUNNING": "green",
    "COMPLETED": "dim",
    "FAILED": "red",
    "CANCELLED": "red",
    "PENDING": "yellow",
}


def _state_style(value: Any) -> str:
    return _STATE_STYLES.get(str(value), "")


JOB_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True, least=8),
    Column("user", "USER", rank=7),
    Column("account", "ACCOUNT", rank=11),
    Column("state", "STATE", style=_state_style),
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", rank=4, flexible=True, least=8),
    Column("batch_size", "BATCH", right=True, rank=2),
    Column("mode", "MODE", rank=10),
    Column("goodput", "GOODPUT", number(3), right=True, rank=3),
    Column("speedup", "SPEEDUP", number(3), right=True, rank=1),
    Column("progress", "DONE", lambda v: "-" if v is None else f"{100 * v:.0f}%", right=True, rank=5),
    Column("moves", "MOVES", right=True, rank=6),
    Column("age_s", "AGE", duration, right=True, rank=8),
    Column("reason", "REASON", plain, flexible=True, least=14, rank=9),
)
"""`mode`: what the job's agent may change, as it last reported; `goodput` in examples of M0-equivalent
progress per second; `speedup` against the job's fair share; `progress` a fraction of the declared training."""

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
