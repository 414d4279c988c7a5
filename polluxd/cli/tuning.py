"""`polluxctl fairness`: show how the cluster is shared, try other settings, set them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

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
    help="How the cluster is shared: power, weights, limits.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

OPTIONS: Mapping[str, object] = {
    "power": Annotated[
        str | None,
        typer.Option(
            "--power",
            "-p",
            metavar="P",
            help="p of the p-mean: 1 mean, 0 geometric, -1 harmonic, -inf max-min",
        ),
    ],
    "accounts": Annotated[
        list[str] | None,
        typer.Option(
            "--account", "--account-weight", metavar="NAME=WEIGHT", help="weight of an account's jobs"
        ),
    ],
    "users": Annotated[
        list[str] | None,
        typer.Option("--user", "--user-weight", metavar="NAME=WEIGHT", help="weight of a user's jobs"),
    ],
    "qos": Annotated[
        list[str] | None,
        typer.Option("--qos", "--qos-weight", metavar="NAME=WEIGHT", help="weight of the jobs of a QOS"),
    ],
    "jobs": Annotated[
        list[str] | None,
        typer.Option("--job", "--job-weight", metavar="ID=WEIGHT", help="weight of one job"),
    ],
    "account_ceilings": Annotated[
        list[str] | None,
        typer.Option(
            "--account-ceiling",
            metavar="NAME=GPUS",
            help="most GPUs that an account's jobs may hold; none: no limit",
        ),
    ],
    "user_ceilings": Annotated[
        list[str] | None,
        typer.Option("--user-ceiling", metavar="NAME=GPUS", help="most GPUs that a user's jobs may hold"),
    ],
    "account_guarantees": Annotated[
        list[str] | None,
        typer.Option(
            "--account-guarantee",
            metavar="NAME=GPUS",
            help="GPUs kept for an account's jobs whenever they can use them",
        ),
    ],
    "user_guarantees": Annotated[
        list[str] | None,
        typer.Option("--user-guarantee", metavar="NAME=GPUS", help="the same for a user's jobs"),
    ],
    "gpu_counts": Annotated[
        str | None,
        typer.Option(
            metavar="RULE", help="counts that a job may get: any, powers-of-two, whole-nodes, 1,2,4,8"
        ),
    ],
    "starvation_bound": Annotated[
        str | None,
        typer.Option(
            metavar="SECONDS", help="a job that waits longer goes before all others; none: no bound"
        ),
    ],
    "remaining_work_power": Annotated[
        float | None,
        typer.Option(
            metavar="Q", help="weight by (remaining work)^Q: 0 no, -0.25 favours jobs near their end"
        ),
    ],
    "hysteresis": Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="a move must raise a job's goodput by more than this"),
    ],
    "partial_nodes": Annotated[
        bool | None,
        typer.Option("--partial-nodes/--whole-nodes", help="what jobs on several nodes may take of each"),
    ],
}
"""The options of `set` and `preview`, each named as the field of `fairness.FairnessOptions` that it fills."""


def _said(command: Callable[[Path | None, fair.FairnessOptions, bool], None]) -> Callable[..., None]:
    """The command with `OPTIONS` as its options, passed on as one value."""

    def run(config: Path | None = None, as_json: bool = False, **words: Any) -> None:
        command(config, fair.FairnessOptions(**words), as_json)

    kinds = {"config": ConfigOption, **OPTIONS, "as_json": JsonOption}
    defaults = {name: False if name == "as_json" else None for name in kinds}
    run.__doc__, run.__annotations__ = command.__doc__, dict(kinds)
    # Typer reads a command's options off its signature.
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            for name, kind in kinds.items()
        ]
    )
    return run


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
@_said
def set_(config: Path | None, words: fair.FairnessOptions, as_json: bool) -> None:
    """Change them, all together or not at all. Every change is audited."""
    words.over(Settings())  # the values' form is checked before the database is asked for anything
    store, defaults = access.open_store(config)
    store.set_settings(words.over(store.settings(defaults)), access.who())
    _show(store.settings(defaults), as_json)


@app.command("preview")
@_said
def preview_(config: Path | None, words: fair.FairnessOptions, as_json: bool) -> None:
    """Show what a change would bring each job. Nothing is changed."""
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
