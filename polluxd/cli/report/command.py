"""`polluxctl report --html FILE`: one page on a period."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from polluxd.errors import ConfigError

from .. import access
from ..access import ConfigOption
from ..period import point
from .figures import figures


def report(
    html: Annotated[Path, typer.Option("--html", help="write the page to this file")],
    since: Annotated[
        str, typer.Option("--since", help="begin: 24h, 7d, 2026-11-20, 2026-11-20T08:00")
    ] = "24h",
    until: Annotated[
        str | None, typer.Option("--until", help="end, in the same form; now by default")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Write one HTML page on a period: jobs, waiting, shares, moves.

    The page needs no network and runs no script. It holds names of jobs, users and accounts.
    """
    from .page import render  # noqa: PLC0415 - Jinja takes a moment to import

    now = time.time()
    begin = point(since, now, "--since")
    end = now if until is None else min(point(until, now, "--until"), now)
    if begin >= end:
        raise typer.BadParameter("expected a time before the end of the period", param_hint="--since")
    store, _ = access.open_store(config)
    found = figures(
        store.cluster,
        begin,
        end,
        views=store.jobs_view(),
        moves=store.moves(),
        costs=store.move_costs(),
        cycles=store.cycles_between(begin, end),
        speedups=store.mean_speedups(begin, end),
    )
    try:
        html.write_text(render(found, version("polluxd"), now), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html {html}: {error.strerror}") from None
    typer.echo(f"written: {html} ({len(found.jobs)} jobs, {len(found.moves)} moves)")
