"""`polluxctl jobs`, `moves`, `cost` and `audit`: what the store holds, as rows."""

from __future__ import annotations

import time
from typing import Annotated, Literal

import typer

from . import access, answers
from .access import ConfigOption, JsonOption, UserOption, WatchOption
from .columns import JOB_COLUMNS, MOVE_COLUMNS
from .output import Column, clock, emit, number, plain
from .period import point
from .pinning import job_id
from .table_rows import audit_rows, move_rows
from .top import newest, redraw

CostBy = Literal["account", "user", "job", "type", "day"]
_COST_KEYS = {"account": "account", "user": "user_name", "job": "job_id", "type": "type", "day": "day"}

AUDIT_COLUMNS = (
    Column("at", "WHEN", clock),
    Column("who", "WHO"),
    Column("name", "SETTING"),
    Column("from", "FROM", plain, flexible=True),
    Column("to", "TO", plain, flexible=True),
)

COST_COLUMNS = (
    Column("name", "NAME"),
    Column("node_hours", "NODE HOURS", number(2), right=True),
    Column("gpu_hours", "GPU HOURS", number(2), right=True),
    Column("cost", "COST", number(2), right=True),
    Column("share", "SHARE", number(3), right=True, rank=1),
    Column("saved_hours", "HOURS SAVED", number(2), right=True),
)


def jobs(
    config: ConfigOption = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="finished jobs too")] = False,
    user: UserOption = None,
    as_json: JsonOption = False,
) -> None:
    """List Pollux jobs: GPUs, batch size, goodput, reason."""
    shown = answers.source(config).jobs(ended=everything)
    chosen = answers.whose(user, config)
    rows = [row for row in shown if chosen in (None, row["user"])]
    emit(rows, JOB_COLUMNS, as_json=as_json, console=access.console(), empty="no Pollux jobs")


def moves(
    job: Annotated[
        int | None, typer.Argument(metavar="[JOB]", parser=job_id, help="of this job only")
    ] = None,
    watch: WatchOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List moves: from, to, seconds by part, why."""
    store, console = access.open_store(config)[0], access.console()
    if watch and console.is_terminal:
        redraw(lambda: newest(move_rows(store, job), MOVE_COLUMNS, console), console)
    else:
        emit(move_rows(store, job), MOVE_COLUMNS, as_json=as_json, console=console, empty="no moves")


def cost(
    config: ConfigOption = None,
    by: Annotated[
        CostBy,
        typer.Option(help="account, user, job, type of node, or day; no name: no job was on the nodes"),
    ] = "account",
    since: Annotated[
        str, typer.Option(metavar="TIME", help="from this day on (UTC): 7d, 2026-11-20")
    ] = "30d",
    as_json: JsonOption = False,
) -> None:
    """Show what rented nodes cost, and the hours that jobs save by them."""
    found: dict[str, list[float]] = {}
    for row in access.open_store(config)[0].rentals(point(since, time.time(), "--since")):
        sums = found.setdefault(str(row[_COST_KEYS[by]] or ""), [0.0, 0.0, 0.0, 0.0])
        for place, name in enumerate(("node_seconds", "gpu_seconds", "cost", "saved_seconds")):
            sums[place] += row[name]
    whole = sum(sums[2] for sums in found.values())
    rows = [
        {
            **{"name": name, "node_hours": n / 3600.0, "gpu_hours": g / 3600.0, "cost": c},
            **{"share": c / whole if whole else 0.0, "saved_hours": saved / 3600.0},
        }
        for name, (n, g, c, saved) in sorted(found.items(), key=lambda item: (-item[1][2], item[0]))
    ]
    emit(rows, COST_COLUMNS, as_json=as_json, console=access.console(), empty="no node was rented")


def audit(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List changes of settings: when, who, from what, to what."""
    emit(
        audit_rows(access.open_store(config)[0]),
        AUDIT_COLUMNS,
        as_json=as_json,
        console=access.console(),
        empty="no changes yet",
    )
