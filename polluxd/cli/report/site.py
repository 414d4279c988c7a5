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
from polluxd.site_report import document, job_log, machine, replay
from polluxd.site_report.gpu_hours import CAUSES
from polluxd.slurm.commands import Commands

from ..access import point
from ..output import Column, jsonable, number
from .drawings import Polyline, chart
from .templates import environment

_PATIENCE_S = 3600.0
"""For sacct's answer: months of a large site take minutes."""
_COLOURS = {
    **{"finished": "c2", "running": "c5", "lost": "c4", "fits": "c1", "fragments": "c3", "walls": "c6"},
    **{"few": "c0", "no_demand": "free", "reserved": "plain", "down": "plain"},
}
_NAME = Column("name", "NAME", flexible=True)


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else number(3)(value)


def report(
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="TIME",
            help="begin: 30d, 2026-11-01, 2026-11-01T08:00 [default: 30d; of a file: the first end in it]",
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="end [default: now; of a file: its last time]"),
    ] = None,
    sacct: Annotated[
        Path | None,
        typer.Option(
            "--sacct",
            metavar="FILE",
            help="output of sacct (see --commands), or a log of Philly, Helios or Acme",
        ),
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
) -> None:
    """Show what a cluster's GPU hours went to, from Slurm's accounting alone.

    It only reads. It needs neither polluxd nor its database, nor root: sacct, or a file of its output.
    """
    now = time.time()
    begin = None if since is None and sacct is not None else point(since or "30d", now, "--since")
    end = (
        None
        if until is None and sacct is not None
        else now
        if until is None
        else point(until, now, "--until")
    )
    if begin is not None and end is not None and begin >= end:
        raise typer.BadParameter("expected a time before the end of the period", param_hint="--since")
    if commands:
        first, last = (_utc(at) for at in (begin or now - 30 * 86400, end or now))
        typer.echo(f"{job_log.command(first, last)} > sacct.txt")
        typer.echo(f"{machine.NODES_COMMAND} > nodes.txt")
        typer.echo(f"{machine.events_command(first, last)} > events.txt")
        typer.echo(f"{machine.reservations_command(first, last)} > reservations.txt")
        return
    site = (
        _given(sacct, nodes, closed or [], begin, end)
        if sacct is not None
        else _asked(begin or 0.0, end or now)
    )
    site = document.anonymised(site) if anonymise else site
    found = document.made(site)
    found["replay"] = replay.replayed_log(site, jobs)
    for line in [*document.summary(found), *replay.lines(found["replay"])]:
        typer.echo(line)
    if as_json is not None:
        _write(as_json, json.dumps(jsonable(found), indent=1, allow_nan=False) + "\n")
    if html is not None:
        _write(html, page(found))


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


def _asked(begin: float, end: float) -> document.Sources:
    """Return the site that this machine's Slurm tells of. Raises ConfigError: sacct does not answer."""
    slurm, known = Commands(timeout=_PATIENCE_S), machine.Nodes()
    first, last = _utc(begin), _utc(end)
    wanted = job_log.command(first, last)
    with temporary_folder("report") as folder:
        path = folder / "sacct.txt"
        try:
            write_named(path, slurm.ask(*_words(wanted)))
        except SlurmError as error:
            raise ConfigError(
                f"{error}. Where sacct works, run `polluxctl report --commands` and its commands; then give their "
                "files here (--sacct FILE --nodes FILE --closed FILE)"
            ) from None
        found = job_log.read_sacct(path)
        document.period_of(found)
        kinds = set()
        for command in (machine.events_command(first, last), machine.reservations_command(first, last)):
            try:
                write_named(path, slurm.ask(*_words(command)))
                kinds.add(machine.read_closed(known, path))
            except (SlurmError, ConfigError) as error:
                typer.echo(f"polluxctl: {error}", err=True)
    try:
        machine.read_nodes(known, slurm.ask(*_words(machine.NODES_COMMAND)))
    except SlurmError as error:
        typer.echo(f"polluxctl: {error}", err=True)
    return document.Sources(found, known, begin, end, "down" in kinds, "reserved" in kinds)


def _words(command: str) -> list[str]:
    """Return the words of a command without its environment: `Commands` sets it, too."""
    return [word for word in shlex.split(command) if not word.startswith(("TZ=", "SLURM_TIME_FORMAT="))]


def _write(path: Path, text: str) -> None:
    try:
        write_named(path, text)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    typer.echo(f"written: {path}", err=True)


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
            lines=[*document.summary(found), *replay.lines(found["replay"])],
            bars=widths,
            over_time=chart("GPUs", over_time, times=True),
            found=found,
            busiest=busiest,
            days=("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"),
            span=document.span,
            tables=[(title, rows, _filled(columns, rows)) for title, rows, columns in _tables(found)],
        )
    )


def _tables(found: Mapping[str, Any]) -> list[tuple[str, Sequence[Any], Sequence[Column]]]:
    hours = [Column(key, key.upper().replace("_", " "), _hours, right=True) for key in CAUSES]
    held = [
        Column("jobs", "JOBS", right=True),
        Column("gpu_hours", "GPU HOURS", _hours, right=True),
        *hours[:3],
    ]
    where = [
        Column(key, title, _share, right=True)
        for key, title in (
            ("fits", "WOULD FIT"),
            ("fragments", "FRAGMENTS"),
            ("walls", "WALLS"),
            ("few", "TOO FEW"),
        )
    ]
    waits = [
        Column("jobs", "JOBS", right=True),
        Column("median_s", "MEDIAN", document.span, right=True),
        Column("p90_s", "90 % BELOW", document.span, right=True),
        Column("hours", "HOURS", _hours, right=True),
        *where,
    ]
    gpus = Column("gpus", "GPUS", number(4), right=True)
    return [
        ("GPU hours by month", found["by_month"], [_NAME, *hours]),
        ("GPU hours by partition", found["by_partition"], [_NAME, gpus, *hours]),
        ("GPU hours by type of GPU", found["by_gpu_type"], [_NAME, gpus, *hours]),
        ("GPU hours held, by account", found["by_account"], [_NAME, *held]),
        ("GPU hours held, by user", found["by_user"], [_NAME, *held]),
        ("GPU hours held, by size of job", found["by_size"], [_NAME, *held]),
        (
            "Waits by size; of their time, the share in which GPUs were idle that",
            found["waits_by_size"],
            [_NAME, *waits],
        ),
        ("Waits by account", found["waits_by_account"], [_NAME, *waits]),
        (
            "One training at several sizes: speedup with its 95 % interval",
            found["experiments"],
            [
                Column("user", "USER"),
                _NAME,
                Column("from_gpus", "FROM", right=True),
                gpus,
                *(Column(key, key.upper(), number(3), right=True) for key in ("speedup", "low", "high")),
                Column("efficiency", "EFFICIENCY", _share, right=True),
                Column("gpu_hours", "GPU HOURS", _hours, right=True),
            ],
        ),
        (
            "GPU hours surely past 50 % efficiency, by user",
            found["past_half"],
            [_NAME, Column("gpu_hours", "GPU HOURS", _hours, right=True)],
        ),
        (
            "Time limits of completed jobs, by user",
            found["limits"]["users"],
            [
                _NAME,
                Column("jobs", "JOBS", right=True),
                Column("median_used", "MEDIAN USED", _share, right=True),
                Column("gpu_hours_unused", "GPU HOURS ASKED FOR AND NOT USED", _hours, right=True),
            ],
        ),
    ]


def _filled(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns that have something to show: most sites have no reservations, for one."""
    return [column for column in columns if any(row[column.key] for row in rows)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"
