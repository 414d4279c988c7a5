"""`polluxctl jobs`, `moves` and `audit`: what the store holds, as rows."""

from __future__ import annotations

from typing import Annotated

import typer

from . import access, answers
from .access import ConfigOption, JsonOption
from .job_columns import JOB_COLUMNS
from .move_columns import MOVE_COLUMNS
from .output import Column, clock, emit, plain
from .table_rows import audit_rows, move_rows

AUDIT_COLUMNS = (
    Column("at", "WHEN", clock),
    Column("who", "WHO"),
    Column("name", "SETTING"),
    Column("from", "FROM", plain, flexible=True),
    Column("to", "TO", plain, flexible=True),
)


def jobs(
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="finished jobs too")] = False,
    user: Annotated[str | None, typer.Option("--user", "-u", help="of this user only")] = None,
    as_json: JsonOption = False,
) -> None:
    """List Pollux jobs: GPUs, batch size, goodput, reason."""
    shown = answers.source(config).jobs(ended=everything)
    rows = [row for row in shown if user in (None, row["user"])]
    emit(rows, JOB_COLUMNS, as_json=as_json, console=access.console(), empty="no Pollux jobs")


def moves(
    job: Annotated[int | None, typer.Argument(metavar="[JOB]", min=1, help="of this job only")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List moves: from, to, seconds by part, why."""
    emit(
        move_rows(access.open_store(config)[0], job),
        MOVE_COLUMNS,
        as_json=as_json,
        console=access.console(),
        empty="no moves",
    )


def audit(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List changes of settings: when, who, from what, to what."""
    emit(
        audit_rows(access.open_store(config)[0]),
        AUDIT_COLUMNS,
        as_json=as_json,
        console=access.console(),
        empty="no changes yet",
    )
