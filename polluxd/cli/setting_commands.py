"""`polluxctl settings`: show, try and set how the cluster is shared."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from polluxd.config.setting_info import (
    OPTIONS,
    SHORT_OPTIONS,
    SettingInfo,
    option_name,
    policy_document,
)
from polluxd.config.settings import PolicySettings
from polluxd.errors import PolluxError
from polluxd.site.slurm_checks import Slurm
from polluxd.slurm.shares import read_shares

from . import access
from .access import ConfigOption, JsonOption
from .output import Column, emit, emit_json, number, plain, table
from .preview import PREVIEW_COLUMNS, previewed, sentences
from .setting_words import Given, changes, rows

app = typer.Typer(
    help="How the cluster is shared: objective, weights, limits.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

SETTING_COLUMNS = (
    Column("name", "SETTING"),
    Column("value", "VALUE", flexible=True, least=16),
    Column("help", "MEANING", flexible=True, rank=1),
)


def _option(info: SettingInfo) -> Any:
    """Return the typer option of one setting, from its declaration."""
    name = option_name(info)
    if info.is_switch:
        return Annotated[bool | None, typer.Option(f"{name}/--no-{name.removeprefix('--')}", help=info.help)]
    hint = "; NAME=none removes an entry" if info.is_table else "; none turns it off" if info.optional else ""
    option = typer.Option(name, *SHORT_OPTIONS.get(info.key, []), metavar=info.metavar, help=info.help + hint)
    return Annotated[list[str] | None, option] if info.is_table else Annotated[str | None, option]


def _takes_settings(
    command: Callable[[Path | None, dict[str, Given | None], bool], None],
) -> Callable[..., None]:
    """Give a command one option per setting, passed as a dictionary."""

    def run(config: Path | None = None, as_json: bool = False, **options: Any) -> None:
        command(config, options, as_json)

    kinds = {"config": ConfigOption, **{info.key: _option(info) for info in OPTIONS}, "as_json": JsonOption}
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


def _show(settings: PolicySettings, as_json: bool) -> None:
    if as_json:
        emit_json(policy_document(settings))
    else:
        emit(rows(settings), SETTING_COLUMNS, as_json=False, console=access.console())


@app.command("get")
def get(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show the settings in force."""
    store, defaults = access.open_store(config)
    _show(store.settings(defaults), as_json)


@app.command("set")
@_takes_settings
def set_(config: Path | None, options: dict[str, Given | None], as_json: bool) -> None:
    """Change settings, all together or none. Every change is audited."""
    changes(options, PolicySettings())  # an unusable value is refused before polluxctl asks the database
    store, defaults = access.open_store(config)
    store.set_settings(changes(options, store.settings(defaults)), access.who())
    _show(store.settings(defaults), as_json)


@app.command("preview")
@_takes_settings
def preview_(config: Path | None, options: dict[str, Given | None], as_json: bool) -> None:
    """Show what a change would bring each job. Nothing is changed."""
    changes(options, PolicySettings())
    found = previewed(*access.open_store(config), options)
    if as_json:
        emit_json(found)
        return
    console = access.console()
    title = f"With the jobs and nodes of cycle {found['cycle']}; nothing is changed"
    if found["jobs"]:
        console.print(table(found["jobs"], PREVIEW_COLUMNS, console.width, title))
        console.print()
    empty = [f"{title}: there were no Pollux jobs"]
    for line in sentences(found["before"], found["after"]) if found["jobs"] else empty:
        console.print(line, markup=False)


SHARE_COLUMNS = (
    Column("of", "OF"),
    Column("name", "NAME", plain),
    Column("weight", "WEIGHT", number(), right=True),
    Column("by_share", "BY SLURM'S SHARE", number(), right=True),
    Column("remark", "REMARK", flexible=True, rank=1),
)


@app.command("slurm-shares")
def slurm_shares(
    config: ConfigOption = None,
    apply: Annotated[
        bool, typer.Option("--set", help="make these the weights of accounts and users")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare the weights of accounts and users with Slurm's shares (sacctmgr)."""
    loaded = access.configuration(config)
    store, defaults = access.open_store(config)
    present = store.settings(defaults)
    conf = Path(loaded.slurm.conf) if loaded.slurm.conf else None
    shares = read_shares(Slurm(conf, timeout=60.0).ask, loaded.slurm.cluster)
    if not shares.accounts:
        raise PolluxError(
            f"slurmdbd shows no user of cluster {loaded.slurm.cluster}: shares are set by sacctmgr, with Fairshare="
        )
    tables = (
        ("account", present.account_weights, shares.accounts),
        ("user", present.user_weights, shares.users),
    )
    emit(
        [
            {
                "of": of,
                "name": name,
                "weight": weights.get(name, 1.0),
                "by_share": by_share.get(name),
                "remark": _share_remark(name, weights.get(name, 1.0), by_share.get(name), shares.differing),
            }
            for of, weights, by_share in tables
            for name in sorted(
                weights.keys() | by_share.keys() | (shares.differing if of == "user" else set())
            )
        ],
        SHARE_COLUMNS,
        as_json=as_json,
        console=access.console(),
    )
    if apply:
        store.set_settings(
            {f"{of}_weights": {**weights, **by_share} for of, weights, by_share in tables}, access.who()
        )


def _share_remark(name: str, weight: float, by_share: float | None, differing: frozenset[str]) -> str:
    if by_share is None:
        return (
            "share differs by account: --set leaves this weight"
            if name in differing
            else "unknown to slurmdbd"
        )
    return "" if weight == by_share else "differs"
