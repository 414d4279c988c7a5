"""`polluxctl decisions`: list the decisions of polluxd, and replay one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from polluxd.errors import PolluxError
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy import decide
from polluxd.store import CycleSummary

from . import access
from .access import ConfigOption, JsonOption
from .output import Column, clock, count, emit, emit_json, number, plain, table
from .replay import DIFFERENCE_COLUMNS, SAMPLES, differences, gain, speedups

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


GAIN_COLUMNS = (
    Column("decisions", "DECISIONS", right=True),
    Column("hours", "HOURS", number(), right=True),
    Column("held", "SPEEDUP NOW", number(), right=True),
    Column("planned", "AS DECIDED", number(), right=True),
    Column("gained_hours", "TRAINING GAINED [h]", number(), right=True),
    Column("error_hours", "+/- [h]", number(), right=True),
)


@app.command("gain")
def gain_(
    config: ConfigOption = None,
    newest: Annotated[int, typer.Option("--newest", "-n", min=2, help="decisions to look at")] = 10000,
    as_json: JsonOption = False,
) -> None:
    """Add up what the decisions promise against what the jobs hold.

    In mode observe: what polluxd would have gained. SPEEDUP is the sum over the jobs, 1 for a job at its fair share and
    0 for one that waits. The cost of moves is left out.
    """
    store, _ = access.open_store(config)
    kept = [s.cycle for s in store.cycles(newest) if s.kept and s.cycle.solver is not None][::-1]
    sample = kept[:: max(1, -(-len(kept) // SAMPLES))]
    found = gain(
        [
            (cycle.started_at, *speedups(decode_snapshot(data)))
            for cycle in sample
            if (data := store.cycle_snapshot(cycle.id)) is not None
        ]
    )
    if found is None:
        raise PolluxError(
            "expected two decisions or more with their snapshots: wait for polluxd's next decisions"
        )
    error = None if found.error is None else found.error * found.hours
    row = {**asdict(found), "gained_hours": found.gained_hours, "error_hours": error}
    emit([row], GAIN_COLUMNS, as_json=as_json, console=access.console())
