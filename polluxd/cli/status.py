"""`polluxctl status`: who leads, and whether polluxd works."""

from __future__ import annotations

import time
from typing import Any

import typer

from polluxd.printable import printable

from . import access
from .access import ConfigOption, JsonOption
from .health import health
from .output import clock, count, duration, emit_json, number, plain
from .table_rows import silent_rows, status_row

_NAMED = 5
"""Jobs that `status` names of those with doubted reports, and of those without any."""


def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show who leads and when polluxd last decided.

    Exit status: 0 polluxd works, 1 it does not decide, 2 something is stuck, or GPUs idle beside a job that may
    use them.
    """
    store, loaded = access.open_store(config)[0], access.configuration(config)
    found = {**status_row(store), "silent": silent_rows(store)}
    verdict = health(found, store.open_moves(), loaded.cycle, loaded.moves, time.time())
    if as_json:
        emit_json({**found, "health": verdict.message, "stuck_since": verdict.stuck_since})
        raise typer.Exit(verdict.exit_status)
    console = access.console()
    decided = found["decided_at"]
    ago = "never" if decided is None else f"{clock(decided)}, {duration(time.time() - decided)} ago"
    for title, value in (
        ("health", verdict.message),
        ("cluster", found["cluster"]),
        ("leader", (found["leader"] or "nobody") + ("" if found["leading"] else " (not seen lately)")),
        ("mode", found["mode"] or "-"),
        ("paused", "yes" if found["paused"] else "no"),
        ("last decision", ago),
        ("objective", number(4)(found["objective"])),
        ("gap to bound", "-" if found["gap"] is None else f"{100 * found['gap']:.2f} %"),
        ("price of a GPU", _price(found["gpu_price"])),
        ("solver", plain(found["solver"])),
        ("doubted reports", _doubted(found["doubted"])),
        ("silent jobs", _silent(found["silent"])),
        ("note", plain(found["note"])),
        ("moves under way", found["open_moves"]),
    ):
        console.print(printable(f"{title:<16} {value}"), markup=False, soft_wrap=True)
    raise typer.Exit(verdict.exit_status)


def _price(price: float | None) -> str:
    """What a GPU costs, under the objective of completion times."""
    if price is None:
        return "-"
    if price <= 0:
        return "0 (GPUs are left)"
    return f"{number(3)(price)} s of all jobs' completion times per second"


def _doubted(jobs: list[dict[str, Any]]) -> str:
    """Number and name the jobs with claims that polluxd does not believe."""
    if not jobs:
        return "none"
    named = ", ".join(f"{job['job_id']} ({job['name']}, {job['user']})" for job in jobs[:_NAMED])
    more = " and others" if len(jobs) > _NAMED else ""
    return f"of {count(len(jobs), 'job')}: {named}{more} (`polluxctl explain JOB`)"


def _silent(jobs: list[dict[str, Any]]) -> str:
    """Name the jobs that hold GPUs and report no training step."""
    if not jobs:
        return "none"
    named = ", ".join(
        f"{job['job_id']} ({job['name']}, {job['user']}: {count(job['gpus'], 'GPU')} for {duration(job['silent_s'])})"
        for job in sorted(jobs, key=lambda job: (-job["gpus"] * job["silent_s"], job["job_id"]))[:_NAMED]
    )
    more = " and others" if len(jobs) > _NAMED else ""
    held = count(sum(job["gpus"] for job in jobs), "GPU")
    return f"{count(len(jobs), 'job')} on {held} without a training step: {named}{more} (`polluxctl explain JOB`)"
