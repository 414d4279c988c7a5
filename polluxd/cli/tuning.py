"""`polluxctl fairness`: show how the cluster is shared, try other settings, set them."""

from __future__ import annotations

from typing import Annotated

import typer

from polluxd.encoding import decode_snapshot
from polluxd.errors import PolluxError
from polluxd.model import Settings

from . import access
from . import fairness as fair
from .access import ConfigOption, JsonOption
from .output import emit_json, table
from .preview import PREVIEW_COLUMNS, preview, sentences

app = typer.Typer(
    help="How the cluster is shared: power of the p-mean, weights, limits.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

PowerOption = Annotated[
    str | None,
    typer.Option(
        "--power",
        "-p",
        metavar="P",
        help="p of the p-mean: 1 mean, 0 geometric, -1 harmonic, -inf max-min",
    ),
]
AccountOption = Annotated[
    list[str] | None,
    typer.Option("--account", "--account-weight", metavar="NAME=WEIGHT", help="weight of an account's jobs"),
]
UserOption = Annotated[
    list[str] | None,
    typer.Option("--user", "--user-weight", metavar="NAME=WEIGHT", help="weight of a user's jobs"),
]
AccountCeilingOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=GPUS", help="most GPUs that an account's jobs may hold; none: no limit"),
]
UserCeilingOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=GPUS", help="most GPUs that a user's jobs may hold")
]
AccountGuaranteeOption = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=GPUS", help="GPUs kept for an account's jobs whenever they can use them"),
]
UserGuaranteeOption = Annotated[
    list[str] | None, typer.Option(metavar="NAME=GPUS", help="the same for a user's jobs")
]
GpuCountsOption = Annotated[
    str | None,
    typer.Option(metavar="RULE", help="counts that a job may get: any, powers-of-two, whole-nodes, 1,2,4,8"),
]
StarvationOption = Annotated[
    str | None,
    typer.Option(metavar="SECONDS", help="a job that waits longer goes before all others; none: no bound"),
]
RemainingWorkOption = Annotated[
    float | None,
    typer.Option(metavar="Q", help="weight by (remaining work)^Q: 0 no, -0.25 favours jobs near their end"),
]
HysteresisOption = Annotated[
    float | None, typer.Option(metavar="SHARE", help="a move must raise a job's goodput by more than this")
]
PartialOption = Annotated[
    bool | None,
    typer.Option("--partial-nodes/--whole-nodes", help="what jobs on several nodes may take of each"),
]


def _show(settings: Settings, as_json: bool) -> None:
    if as_json:
        emit_json(fair.document(settings))
    else:
        typer.echo("\n".join(fair.lines(settings)))


@app.command("get")
def get(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show power, weights, limits."""
    store, defaults = access.open_store(config)
    _show(store.settings(defaults), as_json)


@app.command("set")
def set_(
    config: ConfigOption = None,
    power: PowerOption = None,
    account: AccountOption = None,
    user: UserOption = None,
    account_ceiling: AccountCeilingOption = None,
    user_ceiling: UserCeilingOption = None,
    account_guarantee: AccountGuaranteeOption = None,
    user_guarantee: UserGuaranteeOption = None,
    gpu_counts: GpuCountsOption = None,
    starvation_bound: StarvationOption = None,
    remaining_work_power: RemainingWorkOption = None,
    hysteresis: HysteresisOption = None,
    partial_nodes: PartialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change them; all values are checked first, every change is audited."""
    words = fair.Words(
        power=power,
        accounts=account,
        users=user,
        account_ceilings=account_ceiling,
        user_ceilings=user_ceiling,
        account_guarantees=account_guarantee,
        user_guarantees=user_guarantee,
        gpu_counts=gpu_counts,
        starvation_bound=starvation_bound,
        remaining_work_power=remaining_work_power,
        hysteresis=hysteresis,
        partial_nodes=partial_nodes,
    )
    words.over(Settings())  # the values' form is checked before the database is asked for anything
    store, defaults = access.open_store(config)
    for name, value in words.over(store.settings(defaults)).items():
        store.set_setting(name, value, access.who())
    _show(store.settings(defaults), as_json)


@app.command("preview")
def preview_(
    config: ConfigOption = None,
    power: PowerOption = None,
    account: AccountOption = None,
    user: UserOption = None,
    account_ceiling: AccountCeilingOption = None,
    user_ceiling: UserCeilingOption = None,
    account_guarantee: AccountGuaranteeOption = None,
    user_guarantee: UserGuaranteeOption = None,
    gpu_counts: GpuCountsOption = None,
    starvation_bound: StarvationOption = None,
    remaining_work_power: RemainingWorkOption = None,
    hysteresis: HysteresisOption = None,
    partial_nodes: PartialOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what the same options would change for each job now; changes nothing."""
    words = fair.Words(
        power=power,
        accounts=account,
        users=user,
        account_ceilings=account_ceiling,
        user_ceilings=user_ceiling,
        account_guarantees=account_guarantee,
        user_guarantees=user_guarantee,
        gpu_counts=gpu_counts,
        starvation_bound=starvation_bound,
        remaining_work_power=remaining_work_power,
        hysteresis=hysteresis,
        partial_nodes=partial_nodes,
    )
    words.over(Settings())
    store, defaults = access.open_store(config)
    present = store.settings(defaults)
    wished = fair.with_values(present, words.over(present))
    newest = store.newest_snapshot()
    if newest is None:
        raise PolluxError("no snapshot is kept yet: polluxd stores one with each decision")
    cycle, data = newest
    rows, (before, after) = preview(decode_snapshot(data), present, wished)
    if as_json:
        emit_json(
            {
                "cycle": cycle,
                "settings_before": fair.document(present),
                "settings_after": fair.document(wished),
                "before": before,
                "after": after,
                "jobs": rows,
            }
        )
        return
    console = access.console()
    title = f"On the jobs and nodes of cycle {cycle}; nothing is changed"
    if rows:
        console.print(table(rows, PREVIEW_COLUMNS, console.width, title))
        console.print()
    for line in sentences(before, after) if rows else [f"{title}: there were no Pollux jobs"]:
        console.print(line, markup=False)
