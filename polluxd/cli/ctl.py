"""polluxctl: see what polluxd does and why, and tune it.

The commands parse, read the store and print.

Exit status: 0 done, 1 failed (one line on standard error says why), 2 a wrong call. `status` has its own: see `health`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from polluxd.errors import ConfigError, PolluxError
from polluxd.printable import printable
from polluxd.store import Store

from . import access, answers, database, decisions, hooks, job_story, pinning, setting_commands
from . import top as live
from .access import ConfigOption, JsonOption
from .doctor import doctor
from .health import health
from .history import history
from .job_columns import JOB_COLUMNS
from .output import Column, Row, clock, count, duration, emit, emit_json, number, plain, table
from .pinning import JobArgument
from .recommend_nodes import recommend_nodes
from .report import report
from .simulate import simulate
from .table_rows import audit_rows, move_rows, status_row

app = typer.Typer(
    help="See what polluxd does and why, and tune it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(setting_commands.app, name="settings")
app.add_typer(decisions.app, name="decisions")
app.add_typer(hooks.app, name="hooks")
app.add_typer(database.app, name="db")

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
_NAMED = 5
"""Jobs that `status` names of those with doubted reports."""
AUDIT_COLUMNS = (
    Column("at", "WHEN", clock),
    Column("who", "WHO"),
    Column("name", "SETTING"),
    Column("from", "FROM", plain, flexible=True),
    Column("to", "TO", plain, flexible=True),
)


def _store(config: Path | None) -> Store:
    return access.open_store(config)[0]


@app.command()
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


@app.command()
def top(
    config: ConfigOption = None,
    interval: Annotated[
        float, typer.Option("--interval", "-n", min=0.2, help="seconds between redraws")
    ] = 2.0,
    user: Annotated[str | None, typer.Option("--user", "-u", help="of this user only")] = None,
    sort: Annotated[
        live.SortKey, typer.Option("--sort", "-s", help="order: numbers from the largest, texts from A")
    ] = live.SortKey.job,
    as_json: JsonOption = False,
) -> None:
    """Watch the jobs live. Ctrl-C ends it.

    With --json, and where standard output is no terminal, it prints once.
    """
    source, console = answers.source(config), access.console()

    def read() -> tuple[Row, list[dict[str, Any]]]:
        status, rows = source.top()
        return status, live.chosen(rows, user, sort)

    status, rows = read()
    if as_json:
        emit_json({"status": status, "jobs": [{c.key: row.get(c.key) for c in JOB_COLUMNS} for row in rows]})
    elif console.is_terminal:
        with contextlib.suppress(KeyboardInterrupt):  # how one leaves it
            live.watch(read, console, interval)
    else:
        console.print(live.screen(status, rows, console.width, len(rows) + 5, time.time()))


@app.command()
def explain(job: JobArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Say why a job has what it has, and what more would do."""
    told = answers.source(config).explain(job)
    if as_json:
        emit_json({key: told[key] for key in ("job", "decision", "sizes", "moves", "settings")})
        return
    console = access.console()
    for line in told["story"]:
        console.print(line, soft_wrap=not console.is_terminal, markup=False)
    if told["sizes"]:
        console.print()
        title = "What other sizes would bring" + (
            f", on GPUs of type {told['sizes_of']}" if told["sizes_of"] else ""
        )
        console.print(table(told["sizes"], job_story.SIZE_COLUMNS, console.width, printable(title)))
    if told["moves"]:
        console.print()
        columns = [c for c in MOVE_COLUMNS if c.key not in ("id", "job_id")]
        console.print(table(told["moves"][-8:], columns, console.width, "Its latest moves"))


@app.command()
def moves(
    job: Annotated[int | None, typer.Argument(metavar="[JOB]", min=1, help="of this job only")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List moves: from, to, seconds by part, why."""
    emit(
        move_rows(_store(config), job),
        MOVE_COLUMNS,
        as_json=as_json,
        console=access.console(),
        empty="no moves",
    )


@app.command()
def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show who leads and when polluxd last decided.

    Exit status: 0 polluxd works, 1 it does not decide, 2 a move is stuck.
    """
    store, loaded = _store(config), access.configuration(config)
    found = status_row(store)
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


def _set(store: Store, name: str, value: Any) -> None:
    store.set_setting(name, value, access.who())


@app.command()
def pause(config: ConfigOption = None) -> None:
    """Start, move and stop nothing more until `resume`."""
    _set(_store(config), "paused", True)
    typer.echo(
        "paused until `polluxctl resume`: polluxd starts, moves and stops nothing; moves that have begun are finished, "
        "running jobs run on, decisions are recorded; waiting jobs start as plain Slurm jobs when their lease lapses"
    )


@app.command()
def resume(config: ConfigOption = None) -> None:
    """Let polluxd act again."""
    _set(_store(config), "paused", False)
    typer.echo("resumed")


app.command()(pinning.pin)
app.command()(pinning.unpin)
app.command("cancel-move")(pinning.cancel_move)


@app.command()
def audit(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """List changes of settings: when, who, from what, to what."""
    emit(
        audit_rows(_store(config)),
        AUDIT_COLUMNS,
        as_json=as_json,
        console=access.console(),
        empty="no changes yet",
    )


app.command()(doctor)
app.command()(history)
app.command()(report)
app.command("recommend-nodes")(recommend_nodes)
app.command()(simulate)


def main() -> None:
    """Entry point: every expected failure is one line on standard error."""
    try:
        sys.exit(app(prog_name="polluxctl", standalone_mode=False) or 0)
    except PolluxError as error:
        failure, code = str(error), 2 if isinstance(error, ConfigError) else 1
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        # `polluxctl jobs | head`: the reader has gone, and Python must not complain at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except Exception as error:
        # Usage errors of click, whichever package ships it, explain themselves.
        explain_itself = getattr(error, "format_message", None)
        if explain_itself is None:
            raise
        failure, code = explain_itself(), 2
    faults = [" ".join(line.split()) for line in failure.splitlines() if line.strip()]
    print(printable("polluxctl: " + "; ".join(faults)), file=sys.stderr)
    sys.exit(code)


if __name__ == "__main__":
    main()
