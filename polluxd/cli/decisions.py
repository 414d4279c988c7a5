"""`polluxctl decisions`: list the decisions of polluxd, decide again on their snapshots, and compare."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from polluxd.errors import PolluxError
from polluxd.model import Allocation, Plan
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy import decide
from polluxd.site_report.shadow import gain, plans, sampled, speedups
from polluxd.store import CycleSummary, CycleView
from polluxd.store.written import plan_digest, same_decision

from . import access
from .access import ConfigOption, JsonOption
from .output import Column, clock, count, emit, emit_json, number, plain, table

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
        **{key: getattr(cycle, key) for key in ("mode", "objective", "gap", "solver", "note")},
        "cycle": cycle.id,
        "at": cycle.started_at,
        "jobs": summary.jobs,
        "changed": summary.changed,
        "decide_s": cycle.durations.get("decide_s"),
        "replayable": summary.kept and cycle.solver is not None,
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


DIFFERENCE_COLUMNS = (
    Column("job_id", "JOB", lambda v: "(plan)" if v is None else str(v), right=True),
    Column("what", "WHAT"),
    Column("recorded", "RECORDED", plain, flexible=True, least=20),
    Column("replayed", "REPLAYED", plain, flexible=True, least=20),
)

Difference = dict[str, Any]


def differences(
    cycle: CycleView, recorded: Sequence[Allocation], plan: Plan, made: Sequence[Allocation] | None = None
) -> list[Difference]:
    """Return all differences: of the plan (`job_id` None), then by job.

    Numbers are the same only with all their bits the same. Decisions that are not among `made` were recorded in an
    earlier cycle: the digest of the plan stands for their numbers.
    """
    exact = {a.job_id for a in (recorded if made is None else made)}
    found = [
        _difference(None, what, before, after)
        for what, before, after in (
            ("objective", cycle.objective, _finite(plan.objective)),
            ("upper bound", cycle.upper_bound, _finite(plan.upper_bound)),
            ("solver", cycle.solver, plan.solver),
        )
        if before != after
    ]
    before, after = ({a.job_id: a for a in side} for side in (recorded, plan.allocations))
    for job_id in sorted(before.keys() | after.keys()):
        if job_id not in before or job_id not in after:
            found.append(
                _difference(job_id, "decision", *("made" if job_id in s else "none" for s in (before, after)))
            )
        elif job_id in exact or not same_decision(before[job_id], after[job_id]):
            found += _of_job(before[job_id], after[job_id])
    digest = plan_digest(plan.allocations)
    if not found and cycle.plan_digest not in (None, digest):
        found.append(_difference(None, "digest of all decisions", cycle.plan_digest, digest))
    return found


def _of_job(recorded: Allocation, replayed: Allocation) -> Iterator[Difference]:
    left, right = _values(recorded), _values(replayed)
    for what in {**left, **right}:
        if left.get(what) != right.get(what):
            yield _difference(recorded.job_id, what, left.get(what), right.get(what))


def _values(allocation: Allocation) -> dict[str, Any]:
    """Flatten a decision as the database keeps it; not finite is 0."""
    values: dict[str, Any] = {
        "placement": str(allocation.placement),
        "goodput": allocation.goodput,
        "speedup": allocation.speedup,
        "batch size": allocation.batch_size,
        "changed": allocation.changed,
        "reason": allocation.reason,
    }
    if allocation.explanation is not None:
        values |= {f"explanation: {name}": v for name, v in asdict(allocation.explanation).items()}
    return {k: 0.0 if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _difference(job_id: int | None, what: str, recorded: Any, replayed: Any) -> Difference:
    return {"job_id": job_id, "what": what, "recorded": recorded, "replayed": replayed}


GAIN_COLUMNS = (
    Column("mode", "MODE"),
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
    """Add up what the decisions promise against what the jobs hold: in mode observe, what polluxd would have gained.

    The sum is over the snapshots that are kept, of about a day, and the decisions in the mode of the newest. SPEEDUP is
    the sum over the jobs, 1 for a job at its fair share and 0 for one that waits. The cost of moves is left out.
    """
    store, _ = access.open_store(config)
    kept = [s.cycle for s in store.cycles(newest) if s.kept and s.cycle.solver is not None][::-1]
    mode = kept[-1].mode if kept else ""
    found = gain(
        [
            (seconds, *speedups(plans(decode_snapshot(data))))
            for cycle, seconds in sampled(kept, mode)
            if (data := store.cycle_snapshot(cycle.id)) is not None
        ]
    )
    if found is None:
        raise PolluxError("expected two kept decisions in the present mode: wait for polluxd's next ones")
    error = found.error and found.error * found.hours
    row = {"mode": mode, **asdict(found), "gained_hours": found.gained_hours, "error_hours": error}
    emit([row], GAIN_COLUMNS, as_json=as_json, console=access.console())
