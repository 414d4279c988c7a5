"""`polluxctl status`: who leads, and whether polluxd works."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from polluxd.apply.idle_watch import PREFIX as IDLE
from polluxd.apply.open_moves import in_step_since, stuck_moves
from polluxd.apply.refused.refusals import STUCK
from polluxd.config.settings import CycleSettings, MoveSettings
from polluxd.errors import PolluxError
from polluxd.model import Move
from polluxd.printable import printable
from polluxd.store.views import TROUBLES

from . import access
from .access import ConfigOption, JsonOption
from .output import clock, count, duration, emit_json, number, plain
from .report.at_rest import idle_jobs, mail
from .table_rows import is_silent, job_rows, status_row

_NAMED = 5
"""Jobs that `status` names of those with doubted reports, and of those without any."""


def status(
    config: ConfigOption = None,
    as_json: JsonOption = False,
    mail_owners: Annotated[
        bool, typer.Option("--mail-owners", help="also mail the owners of jobs whose GPUs do nothing")
    ] = False,
) -> None:
    """Show who leads and when polluxd last decided.

    Exit status: 0 polluxd works, 1 it does not decide, 2 something is stuck, or GPUs idle beside a job that may
    use them.
    """
    store, loaded = access.open_store(config)[0], access.configuration(config)
    names = ("job_id", "name", "user", "gpus", "silent_s")
    silent = [{name: row[name] for name in names} for row in job_rows(store, ended=False) if is_silent(row)]
    silent.sort(key=lambda job: (-job["gpus"] * job["silent_s"], job["job_id"]))
    gpus = count(sum(job["gpus"] for job in silent), "GPU")
    idle, unknown = list[dict[str, Any]](), list[str]()
    try:
        idle = idle_jobs(loaded.metrics)
        unknown = mail(idle) if mail_owners else []
    except PolluxError as error:
        unknown = [str(error)]
    found = {**status_row(store), "silent": silent, "idle": idle, "idle_unknown": unknown}
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
        ("doubted reports", _named(found["doubted"], "of {jobs}")),
        ("silent jobs", _named(silent, f"{{jobs}} on {gpus} without a training step")),
        ("GPUs at rest", "; ".join([_at_rest(idle, asked=bool(loaded.metrics.prometheus)), *unknown])),
        ("reports today", _reported(found["reported"])),
        ("note", plain(found["note"])),
        ("moves under way", found["open_moves"]),
    ):
        console.print(printable(f"{title:<16} {value}"), markup=False, soft_wrap=True)
    raise typer.Exit(verdict.exit_status)


def _price(price: float | None) -> str:
    """What a GPU costs, under the objective of completion times."""
    if price is None or price <= 0:
        return "-" if price is None else "0 (GPUs are left)"
    return f"{number(3)(price)} s of all jobs' completion times per second"


def _reported(users: list[dict[str, Any]]) -> str:
    """Say who has reported most since midnight (UTC), and whose jobs now report once in 5 minutes."""
    if not users:
        return "none"
    most = users[0]
    full = [str(user["user_name"] or user["uid"]) for user in users if user["share"] >= 1]
    return (
        f"most by {most['user_name'] or most['uid']}: {most['reports']}, {most['bytes'] / 2**20:.0f} MiB, "
        f"{100 * most['share']:.0f} % of what a user may"
        + (f"; the jobs of {', '.join(full)} report once in 5 minutes until 00:00 UTC" if full else "")
    )


def _named(jobs: list[dict[str, Any]], text: str) -> str:
    """Number the jobs in a text, and name the first, and how long each has held its GPUs in silence."""
    if not jobs:
        return "none"
    named = ", ".join(
        f"{job['job_id']} ({job['name']}, {job['user']}"
        + (f": {count(job['gpus'], 'GPU')} for {duration(job['silent_s'])})" if "silent_s" in job else ")")
        for job in jobs[:_NAMED]
    )
    more = " and others" if len(jobs) > _NAMED else ""
    return f"{text.format(jobs=count(len(jobs), 'job'))}: {named}{more} (`polluxctl explain JOB`)"


def _at_rest(idle: list[dict[str, Any]], *, asked: bool) -> str:
    """Name the jobs whose GPUs do nothing, by what Prometheus knows."""
    if not idle:
        return "none" if asked else "not known (metrics.prometheus)"
    gpus = count(sum(job["idle"] for job in idle), "GPU")
    named = ", ".join(
        f"{job['job_id']} ({job['name']}, {job['user']}: {job['idle']} of {count(job['gpus'], 'GPU')})"
        for job in idle[:_NAMED]
    )
    return f"{gpus} of {count(len(idle), 'job')} do nothing: {named}" + (
        " and others" if len(idle) > _NAMED else ""
    )


INTERVALS = 3
"""A leader that has not decided for so many intervals is late."""


@dataclass(frozen=True, slots=True)
class Health:
    """Whether polluxd works, and since when it does not.

    Exit status 0: it works. 1: it does not decide. 2: a move is stuck, Slurm refuses to start jobs, decisions take
    longer than the interval, or GPUs idle beside a job that may use them.
    """

    exit_status: int
    message: str
    stuck_since: float | None = None
    """When the oldest stuck move entered its step, Slurm first refused, or the GPUs became idle."""


def health(
    status: Mapping[str, Any], moves: Sequence[Move], cycle: CycleSettings, limits: MoveSettings, now: float
) -> Health:
    """Judge the newest decision and the moves under way."""
    if status["leader"] is None or not status["leading"]:
        return Health(1, "no polluxd leads: look at `systemctl status polluxd` on the controller")
    if trouble := TROUBLES.get(status.get("trouble", "")):
        return Health(
            1, f"polluxd takes no action: {trouble}: look at polluxd's log (`journalctl -u polluxd`)"
        )
    decided = status["decided_at"]
    if decided is None:
        return Health(1, "polluxd leads and has not decided yet")
    if now - decided > INTERVALS * cycle.interval_s:
        return Health(
            1,
            f"the last decision is {duration(now - decided)} old, expected one every {duration(cycle.interval_s)}: "
            "look at polluxd's log",
        )
    stuck = stuck_moves(moves, limits, now)
    if stuck and not status["paused"]:
        move, since = stuck[0], in_step_since(stuck[0])
        return Health(
            2,
            f"stuck since {clock(since)}: the move of job {move.job_id} to {move.target} is still {move.step.value} "
            f"(`polluxctl moves {move.job_id}`)",
            since,
        )
    notes = str(status.get("note") or "").split("; ")
    if notes[0].startswith(STUCK):
        return Health(2, notes[0], _since(notes[0].removeprefix(STUCK)))
    took = sum(dict(status.get("durations") or {}).values())
    if took > cycle.interval_s:
        return Health(
            2,
            f"the last decision took {duration(took)}, longer than cycle.interval_s ({duration(cycle.interval_s)}): "
            "raise the interval, or look at polluxd's log for what is slow",
        )
    idle = next((note for note in notes if note.startswith(IDLE)), "")
    if idle:
        return Health(2, idle, _since(idle.removeprefix(IDLE)))
    return Health(0, "paused: polluxd moves nothing until `polluxctl resume`" if status["paused"] else "ok")


def _since(text: str) -> float:
    """Read the time in UTC with which a text begins."""
    return datetime.fromisoformat(text[: len("2027-01-15 08:00:00")]).replace(tzinfo=UTC).timestamp()
