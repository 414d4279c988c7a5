"""`polluxctl report`: what the cluster's GPU hours went to, from Slurm's accounting alone."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from pollux.private_folder import temporary_folder, write_named
from polluxd.errors import ConfigError, SlurmError
from polluxd.model.snapshot_json import decode_snapshot
from polluxd.site_report import document, job_log, machine, replay, shadow
from polluxd.site_report.gpu_hours import CAUSES, DEMANDS
from polluxd.slurm.commands import Commands

from .. import access
from ..access import ConfigOption, point
from ..output import Column, jsonable, number, plain, require_writable, write_page
from .drawings import Polyline, chart
from .templates import environment

_PATIENCE_S = 3600.0
"""For sacct's answer: months of a large site take minutes."""
_COLOURS = {
    **{"finished": "c2", "running": "c5", "lost": "c4", "fits": "c1", "fragments": "c3", "walls": "c6"},
    **{"few": "c0", "no_demand": "free", "reserved": "plain", "down": "plain"},
}


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number(3)(value)


def report(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="begin: 30d, 2026-11-01, 2026-11-01T08:00 [default: 30d; of a file: the first ends in it]",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="end [default: now; of a file: its last time]"),
    ] = None,
    sacct: Annotated[
        Path | None,
        typer.Option("--sacct", metavar="FILE", help="output of sacct (see --commands), or Philly's log"),
    ] = None,
    nodes: Annotated[
        Path | None, typer.Option("--nodes", metavar="FILE", help="output of `scontrol show nodes -o`")
    ] = None,
    closed: Annotated[
        list[Path] | None,
        typer.Option(
            "--closed",
            metavar="FILE",
            help="output of `sacctmgr show event` or `sacctmgr show reservation` (see --commands); repeatable",
        ),
    ] = None,
    commands: Annotated[
        bool,
        typer.Option("--commands", help="print the commands whose output is needed, and do nothing more"),
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="write one page that needs no network")
    ] = None,
    as_json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write all figures, unrounded")
    ] = None,
    anonymise: Annotated[
        bool,
        typer.Option("--anonymise", help="hash the names of users, accounts, partitions, jobs, GPU types"),
    ] = False,
    jobs: Annotated[
        int,
        typer.Option(
            "--replay", metavar="JOBS", min=0, help="also replay so many jobs under Pollux (minutes)"
        ),
    ] = 0,
    shadowed: Annotated[
        bool,
        typer.Option("--shadow", help="also what polluxd in mode observe would have done (its database)"),
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Show what a cluster's GPU hours went to, from Slurm's accounting alone.

    It only reads. It needs neither polluxd nor its database, nor root: sacct, or a file of its output.
    """
    now = time.time()
    begin = None if since is None and sacct is not None else point(since or "30d", now, "--since")
    end = None if until is None and sacct is not None else point(until or "0m", now, "--until")
    if begin is not None and end is not None and begin >= end:
        raise typer.BadParameter("expected a time before the end of the period", param_hint="--since")
    if commands:
        first, last = (_utc(at) for at in (begin or now - 30 * 86400, end or now))
        typer.echo(f"{job_log.command(first, last)} > sacct.txt")
        typer.echo(f"{machine.NODES_COMMAND} > nodes.txt")
        typer.echo(f"{machine.events_command(first, last)} > events.txt")
        typer.echo(f"{machine.reservations_command(first, last)} > reservations.txt")
        return
    require_writable(as_json, html)
    if sacct is not None:
        site = _given(sacct, nodes, closed or [], begin, end)
    else:
        with temporary_folder("report") as folder:
            site = _given(*_asked(folder, _utc(begin or 0.0), _utc(end or now)), begin, end)
    site = document.anonymised(site) if anonymise else site
    found = document.made(site)
    found["replay"] = replay.replayed_log(site, jobs)
    if shadowed:
        found["shadow"] = _shadow(site, config)
        found["obtained"].append(shadow.OBTAINED)
    for line in _lines(found):
        typer.echo(line)
    if as_json is not None:
        write_page(as_json, json.dumps(jsonable(found), indent=1, allow_nan=False) + "\n")
    if html is not None:
        write_page(html, page(found))


def _shadow(site: document.Sources, config: Path | None) -> Mapping[str, Any]:
    store, _ = access.open_store(config)
    cycles = store.cycles_between(site.since, site.until, kept=True)
    decided = shadow.sampled([cycle for cycle in cycles if cycle.solver is not None], "observe")
    kept = ((seconds, store.cycle_snapshot(cycle.id)) for cycle, seconds in decided)
    return shadow.chapter([(seconds, decode_snapshot(data)) for seconds, data in kept if data], site.records)


def _lines(found: Mapping[str, Any]) -> list[str]:
    return [*document.summary(found), *replay.lines(found["replay"]), *shadow.lines(found.get("shadow"))]


def _utc(at: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(at))


def _given(
    sacct: Path, nodes: Path | None, closed: Sequence[Path], begin: float | None, end: float | None
) -> document.Sources:
    """Return the site of some files."""
    found, known = job_log.read(sacct), machine.Nodes()
    if nodes is not None:
        machine.read_nodes(known, machine.text_of(nodes))
    kinds = {machine.read_closed(known, path) for path in closed}
    first, last = document.period_of(found)
    first, last = first if begin is None else begin, last if end is None else end
    if first >= last:
        raise ConfigError(f"{sacct}: it has no time between --since and --until; it ends at {_utc(last)}")
    return document.Sources(found, known, first, last, "down" in kinds, "reserved" in kinds)


def _asked(folder: Path, first: str, last: str) -> tuple[Path, Path | None, list[Path]]:
    """Write what this machine's Slurm tells; return the files. Raises ConfigError: sacct does not answer."""
    slurm = Commands(timeout=_PATIENCE_S)

    def kept(name: str, command: str) -> Path | None:
        path = folder / name
        try:
            write_named(path, slurm.ask(*_words(command)))
        except SlurmError as error:
            typer.echo(f"polluxctl: {error}", err=True)
            return None
        return path

    if (sacct := kept("sacct", job_log.command(first, last))) is None:
        raise ConfigError(
            "no accounting here. Where sacct works, run the commands that `polluxctl report --commands` prints; then "
            "give their files here (--sacct FILE --nodes FILE --closed FILE)"
        )
    closed = [
        kept("events", machine.events_command(first, last)),
        kept("reservations", machine.reservations_command(first, last)),
    ]
    return sacct, kept("nodes", machine.NODES_COMMAND), [path for path in closed if path is not None]


def _words(command: str) -> list[str]:
    """Return the words of a command without its environment: `Commands` sets it, too."""
    return [word for word in shlex.split(command) if not word.startswith(("TZ=", "SLURM_TIME_FORMAT="))]


def page(found: Mapping[str, Any]) -> str:
    """Return the page of a report: the templates escape every name."""
    over_time = [
        Polyline(label, colour, found["over_time"][key], steps=True, filled=key == "held")
        for key, label, colour in (
            ("held", "held by jobs", "c0"),
            ("idle", "idle", "plain"),
            ("waiting", "that waiting jobs ask for", "c1"),
        )
        if found["over_time"][key]
    ]
    widths, left = [], 0.0
    for row in found["causes"]:
        widths.append({**row, "x": 480 * left, "width": 480 * row["share"], "colour": _COLOURS[row["cause"]]})
        left += row["share"]
    busiest = max((wait for day in found["wait_by_hour"] for wait in day if wait is not None), default=0.0)
    return (
        environment()
        .get_template("site.html.jinja")
        .render(
            title="Where the GPU hours went",
            lines=_lines(found),
            bars=widths,
            over_time=chart("GPUs", over_time, times=True),
            found=found,
            busiest=busiest,
            days=("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
            span=document.span,
            tables=_tables(found),
        )
    )


def _tables(found: Mapping[str, Any]) -> list[tuple[str, Sequence[Any], Sequence[Column]]]:
    shadowed = (found.get("shadow") or {"jobs": ()})["jobs"][: document.MOST_ROWS]
    return [
        (title, rows, [_column(name) for name in names if any(row[name] for row in rows)])
        for title, rows, names in (
            ("GPU hours by month", found["by_month"], ("name", *CAUSES)),
            (
                "GPU hours by partition; a node of several partitions counts in each",
                found["by_partition"],
                ("name", "gpus", *CAUSES),
            ),
            ("GPU hours by type of GPU", found["by_gpu_type"], ("name", "gpus", *CAUSES)),
            ("GPU hours held, by account", found["by_account"], _HELD),
            ("GPU hours held, by user", found["by_user"], _HELD),
            ("GPU hours held, by size of job", found["by_size"], _HELD),
            (
                "Waits by size; share of their time by the idle GPUs beside them",
                found["waits_by_size"],
                _WAITS,
            ),
            ("Waits by account", found["waits_by_account"], _WAITS),
            ("One training at several sizes: speedup, 95 % interval", found["experiments"], _EXPERIMENTS),
            ("GPU hours past 50 % efficiency, by user", found["past_half"], ("name", "gpu_hours")),
            ("Time limits of completed jobs, by user", found["limits"]["users"], _LIMITS),
            ("What polluxd would have done in mode observe, job by job", shadowed, _SHADOW),
        )
    ]


_HELD = ("name", "jobs", "gpu_hours", "finished", "running", "lost")
_WAITS = ("name", "jobs", "median_s", "p90_s", "hours", *(f"while_{name}" for name in DEMANDS))
_EXPERIMENTS = ("user", "name", "from_gpus", "gpus", "speedup", "low", "high", "efficiency", "gpu_hours")
_LIMITS = ("name", "jobs", "median_used", "gpu_hours_unused")
_SHADOW = (
    *("job_id", "name", "user", "state", "hours", "waited_s", "decided_wait_s"),
    *("held_gpu_hours", "decided_gpu_hours", "trained_h", "decided_h", "gained_h"),
)


def _column(name: str) -> Column:
    shares = ("efficiency", "median_used", *(f"while_{each}" for each in DEMANDS))
    show = (
        plain
        if name in ("name", "user", "jobs", "job_id", "state")
        else document.span
        if name.endswith("_s")
        else _share
        if name in shares
        else _hours
    )
    title = name.removesuffix("_s").replace("_", " ").upper()
    return Column(name, title, show, right=name not in ("name", "user", "state"), flexible=name == "name")


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
