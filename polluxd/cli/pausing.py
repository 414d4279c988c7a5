"""`polluxctl pause` and `resume`: orders for the whole cluster."""

from __future__ import annotations

import typer

from . import access
from .access import ConfigOption


def _set_paused(config: ConfigOption, *, paused: bool) -> None:
    access.open_store(config)[0].set_setting("paused", paused, access.who())


def pause(config: ConfigOption = None) -> None:
    """Start, move and stop nothing more until `resume`."""
    _set_paused(config, paused=True)
    typer.echo(
        "paused until `polluxctl resume`: polluxd starts, moves and stops nothing; moves that have begun are finished, "
        "running jobs run on, decisions are recorded; waiting jobs start as plain Slurm jobs when their lease lapses"
    )


def resume(config: ConfigOption = None) -> None:
    """Let polluxd act again."""
    _set_paused(config, paused=False)
    typer.echo("resumed")
