"""The columns of the tables that the report and the live page share."""

from __future__ import annotations

from typing import Any

from ..columns import MOVE_COLUMNS
from ..output import Column, clock, duration, number


def _hours(gpu_seconds: Any) -> str:
    return number(3)((gpu_seconds or 0.0) / 3600)


SHARE_COLUMNS = (
    Column("gpu_seconds", "GPU HOURS", _hours, right=True),
    Column("share", "SHARE OF GPU TIME", lambda v: f"{number(3)(100 * (v or 0.0))} %", right=True),
    Column("waited_s", "MEAN WAIT", duration, right=True),
    Column("completion_s", "MEAN COMPLETION", duration, right=True),
    Column("speedup", "MEAN SPEEDUP", number(3), right=True),
)
PATH_COLUMNS = (
    Column("path", "PATH"),
    Column("completed", "COMPLETED", right=True),
    Column("failed", "FAILED OR WITHDRAWN", right=True),
    Column("median_s", "MEDIAN COST", duration, right=True),
    Column("total_s", "TRAINING LOST", duration, right=True),
)
JOB_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True),
    Column("user", "USER"),
    Column("account", "ACCOUNT"),
    Column("state", "STATE"),
    Column("submitted_at", "SUBMITTED", clock),
    Column("completion_s", "COMPLETION", duration, right=True),
    Column("waited_s", "WAITED", duration, right=True),
    Column("gpu_seconds", "GPU HOURS", _hours, right=True),
    Column("speedup", "SPEEDUP", number(3), right=True),
    Column("moves", "MOVES", right=True),
    Column("lost_s", "LOST", duration, right=True),
)
REASON_COLUMNS = tuple(column for column in MOVE_COLUMNS if column.key not in ("id", "steps"))
"""Of a move: without the seconds of its steps."""
ACCOUNT_COLUMNS, USER_COLUMNS = (
    (Column("name", title, flexible=True), Column("jobs", "JOBS", right=True), *SHARE_COLUMNS)
    for title in ("ACCOUNT", "USER")
)
NOTE_COLUMNS = (Column("note", "NOTE", flexible=True), Column("cycles", "CYCLES", right=True))
