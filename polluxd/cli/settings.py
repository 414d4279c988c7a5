"""`polluxctl settings`: show, try and set how the cluster is shared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from polluxd.config.setting_info import (
    OPTIONS,
    SHORT_OPTIONS,
    SettingInfo,
    checked,
    infos,
    option_name,
    policy_document,
)
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError, PolluxError
from polluxd.model import Allocation, Plan
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.policy import decide
from polluxd.policy.cloud.prices import hourly
from polluxd.slurm.configuration import Slurm
from polluxd.slurm.shares import read_shares
from polluxd.store import Store

from . import access
from .access import ConfigOption, JsonOption
from .output import Column, emit, emit_json, number, plain, table

Given = str | bool | Sequence[str]
"""What the command line gives for one setting: text, a switch, or NAME=VALUE options."""


def changes(options: Mapping[str, Given | None], present: PolicySettings) -> dict[str, Any]:
    """Return the new values of the settings that were given, by name; checked.

    Raises:
        ConfigError: no setting was given, a value is out of range, or two values contradict each other.
    """
    wanted = {
        info.key: checked(info.key, _value(info, given, present))
        for info in OPTIONS
        if (given := options.get(info.key)) is not None and given != []
    }
    if not wanted:
        raise ConfigError("nothing to set: give at least one option (see --help)")
    if any(name.endswith(("_ceilings", "_guarantees")) for name in wanted):
        for conflict in replace(present, **wanted).conflicts():
            raise ConfigError(f"{conflict}; change one of them")
    return wanted


def _value(info: SettingInfo, given: Given, present: PolicySettings) -> Any:
    if isinstance(given, bool):
        return given
    if info.is_table:
        return _merged(info, given, getattr(present, info.key))
    assert isinstance(given, str)
    if info.optional and given.lower() == "none":
        return None
    return _typed(given, info.type)


def _merged(info: SettingInfo, given: Sequence[str], present: Mapping[str, Any]) -> dict[str, Any]:
    """Merge NAME=VALUE options into the present table; none removes."""
    entries = dict(present)
    for word in given:
        name, equals, text = word.rpartition("=")
        if not (equals and name and text):
            raise ConfigError(
                f"{option_name(info)}: expected {info.metavar}, or NAME=none to remove an entry, got {word!r}"
            )
        if text == "none":
            entries.pop(name, None)
        else:
            entries[name] = _typed(text, info.entry_type)
    return entries


def _typed(text: str, kind: str) -> Any:
    """Return a number of this JSON type. What is none stays text, which the setting's own check refuses."""
    try:
        return {"integer": int, "number": float}.get(kind, str)(text)
    except ValueError:
        return text


def setting_rows(settings: PolicySettings) -> list[dict[str, str]]:
    return [
        {"name": info.key, "value": in_words(getattr(settings, info.key)), "help": info.help}
        for info in infos("policy")
    ]


def in_words(value: Any) -> str:
    """Return a setting's value as people read and type it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={in_words(inner)}" for name, inner in sorted(value.items())) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


PREVIEW_COLUMNS = (
    Column("job_id", "JOB", right=True),
    Column("name", "NAME", flexible=True, least=8, rank=3),
    Column("user", "USER", rank=4),
    Column("account", "ACCOUNT", rank=2),
    Column("gpus_now", "NOW", right=True, rank=1),
    Column("gpus_before", "BEFORE", right=True),
    Column("gpus_after", "AFTER", right=True),
    Column("speedup_before", "SPEEDUP", number(3), right=True),
    Column("speedup_after", "SPEEDUP AFTER", number(3), right=True),
    Column("reason_after", "REASON", flexible=True, least=14, rank=5),
)

Side = dict[str, Any]


def previewed(store: Store, defaults: PolicySettings, options: Mapping[str, Given | None]) -> dict[str, Any]:
    """Return what `polluxctl settings preview` shows. Nothing is changed.

    Raises:
        ConfigError: no option is given, or a value cannot be used.
        PolluxError: no decision is stored.
    """
    present = store.settings(defaults)
    proposed = replace(present, **changes(options, present))
    newest = store.newest_snapshot()
    if newest is None:
        raise PolluxError("no snapshot is stored yet: polluxd stores one with each decision")
    cycle, data = newest
    snapshot, found = decode_snapshot(data), dict[str, Any](cycle=cycle)
    rows: dict[str, dict[int, Side]] = {}
    for when, settings in (("before", present), ("after", proposed)):
        tried = replace(snapshot, settings=settings)
        plan = decide(tried)
        found[f"settings_{when}"] = policy_document(settings)
        found[when] = summary(plan) | {"rented_cost": hourly(tried, plan)}
        rows[when] = {a.job_id: _side(a, when) for a in plan.allocations}
    found["jobs"] = [
        {
            **{key: getattr(job, key) for key in ("job_id", "name", "user", "account")},
            "gpus_now": job.placement.gpus,
            **rows["before"][job.job_id],
            **rows["after"][job.job_id],
        }
        for job in snapshot.jobs
    ]
    return found


def _side(placed: Allocation, when: str) -> dict[str, Any]:
    return {
        f"gpus_{when}": placed.placement.gpus,
        f"placement_{when}": str(placed.placement),
        f"speedup_{when}": placed.speedup,
        f"reason_{when}": placed.reason,
    }


def summary(plan: Plan) -> Side:
    """Of one plan: how well it does by all, and how much it would move."""
    speedups = [a.speedup for a in plan.allocations]
    return {
        "mean_speedup": fmean(speedups) if speedups else None,
        "least_speedup": min(speedups, default=None),
        "running": sum(bool(a.placement) for a in plan.allocations),
        "gpus": sum(a.placement.gpus for a in plan.allocations),
        "to_change": sum(a.changed for a in plan.allocations),
        "objective": plan.objective,
        "gap": plan.gap,
    }


def sentences(before: Side, after: Side) -> list[str]:
    show = number(3)
    return [
        f"{title}: {show(before[key])} before, {show(after[key])} after"
        if "speedup" in key
        else f"{title}: {before[key]} before, {after[key]} after"
        for key, title in (
            ("mean_speedup", "mean speedup"),
            ("least_speedup", "least speedup"),
            ("running", "jobs with GPUs"),
            ("gpus", "GPUs held"),
            ("to_change", "jobs to start, move or stop"),
            ("rented_cost", "cost of the rented nodes in use, per hour"),
        )
    ]


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
    if info.type == "boolean":
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
        emit(setting_rows(settings), SETTING_COLUMNS, as_json=False, console=access.console())


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
    shares = read_shares(Slurm(loaded.slurm.conf, timeout=60.0).ask, loaded.slurm.cluster)
    if not shares.accounts:
        raise PolluxError(
            f"slurmdbd shows no user of cluster {loaded.slurm.cluster}: shares are set by sacctmgr, with Fairshare="
        )
    tables = (
        ("account", present.account_weights, shares.accounts),
        ("user", present.user_weights, shares.users),
    )
    rows = []
    for of, weights, by_share in tables:
        for name in sorted({*weights, *by_share, *(shares.differing if of == "user" else ())}):
            weight, share = weights.get(name, 1.0), by_share.get(name)
            remark = "" if weight == share else "differs"
            if share is None:
                known = name in shares.differing
                remark = (
                    "share differs by account: --set leaves this weight" if known else "unknown to slurmdbd"
                )
            rows.append({"of": of, "name": name, "weight": weight, "by_share": share, "remark": remark})
    emit(rows, SHARE_COLUMNS, as_json=as_json, console=access.console())
    if apply:
        store.set_settings(
            {f"{of}_weights": {**weights, **by_share} for of, weights, by_share in tables}, access.who()
        )
