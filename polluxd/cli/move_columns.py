"""The columns of a table of moves."""

from __future__ import annotations

from .output import Column, clock

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
