"""`polluxctl decisions`: list the decisions of polluxd, and replay one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from polluxd.errors import PolluxError
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy import decide
from polluxd.store import CycleSummary

from . import access
from .access import ConfigOption, JsonOption
from .output import Column, clock, count, emit, emit_json, number, plain, table
from .replay import DIFFERENCE_COLUMNS, differences

app = typer.Typer(
    help="The decisions made so far, and their replay.", no_args_is_help=True, rich_markup_mode=None
)

CYCLE_COLUMNS = (
    Column("cycle", "CYCLE", right=True),
    Column("at", "WHEN", clock),
    Column("mode", "MODE", rank=2),
    Column("jobs", "JOBS", right=True),
    Column("changed", "CHANGED", right=True),
    Column("objective", "OBJECTIVE", number(4), right=True, rank=1),
    Column("gap", "GAP", lambda v: "-" if v is None else f"{100 * v:.2f}%", right=True, rank=4),
    Column("solver", "SOLVER", rank=5),
    Column("decide_s", "TOOK", lambda v: "-" if v is None else f"{1e3 * v:.0f}ms", right=True, rank=3),
    Column("replayable", "REPLAY", lambda v: "yes" if v else "no"),
    Column("note", "NOTE", plain, flexible=True, rank=6),
)


@app.command("list")
def list_cycles(
    config: ConfigOption = None,
    newest: Annotated[int, typer.Option("--newest", "-n", min=1, help="how many")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List the newest decisions, and which can be replayed."""
    store, _ = access.open_store(config)
    rows = [_row(summary) for summary in store.cycles(newest)]
    emit(rows, CYCLE_COLUMNS, as_json=as_json, console=access.console(), empty="no decisions yet")


def _row(summary: CycleSummary) -> dict[str, Any]:
    cycle = summary.cycle
    return {
        "cycle": cycle.id,
        "at": cycle.started_at,
        "mode": cycle.mode,
        "jobs": summary.jobs,
        "changed": summary.changed,
        "objective": cycle.objective,
        "gap": cycle.gap,
        "solver": cycle.solver,
        "decide_s": cycle.durations.get("decide_s"),
        "replayable": summary.kept and cycle.solver is not None,
        "note": cycle.note,
    }


@app.command()
def replay(
    cycle: Annotated[int, typer.Argument(metavar="ID", min=1, help="of `decisions list`")],
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Decide again on a stored snapshot and compare the plans.

    Exit status 1 unless they are the same, bit for bit.
    """
    store, _ = access.open_store(config)
    recorded = store.cycle(cycle)
    if recorded is None:
        raise PolluxError(
            f"cycle {cycle} is not recorded, or no more: `polluxctl decisions list` shows which are"
        )
    if recorded.solver is None:
        raise PolluxError(f"nothing was decided in cycle {cycle}: {recorded.note or 'no reason recorded'}")
    data = store.cycle_snapshot(cycle)
    if data is None:
        raise PolluxError(
            f"the snapshot of cycle {cycle} is not kept any more, its plan alone is: snapshots are pruned before "
            "the cycles; `polluxctl decisions list` shows which can be replayed"
        )
    plan = decide(decode_snapshot(data))
    made = store.allocations(cycle, made_in_it=True)
    found = differences(recorded, store.allocations(cycle), plan, made)
    if as_json:
        emit_json(
            {
                "cycle": cycle,
                "identical": not found,
                "jobs": len(plan.allocations),
                "objective": plan.objective,
                "differences": found,
            }
        )
    elif not found:
        typer.echo(
            f"cycle {cycle}: the same plan, bit for bit: {count(len(plan.allocations), 'job')}, "
            f"objective {plan.objective!r}"
        )
    else:
        typer.echo(
            f"cycle {cycle}: another plan, in {count(len(found), 'value')}. Was it made by another version of "
            "polluxd, or on another kind of processor?"
        )
        console = access.console()
        console.print(table(found, DIFFERENCE_COLUMNS, console.width))
    if found:
        raise typer.Exit(1)
