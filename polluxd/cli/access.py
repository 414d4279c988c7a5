"""The start of every polluxctl command: store, terminal, user, options."""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from polluxd.cli.output import PrintableConsole
from polluxd.config.config_file import DEFAULT_PATH, Config, load_config
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError
from polluxd.store import Store

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", envvar="POLLUXD_CONFIG", help=f"polluxd's configuration [{DEFAULT_PATH}]"),
]
UserOption = Annotated[
    str | None,
    typer.Option("--user", "-u", help="of this user; all: of everybody [you; administrators: all]"),
]
WatchOption = Annotated[bool, typer.Option("--watch", "-w", help="redraw until Ctrl-C")]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, unrounded")]


def console() -> PrintableConsole:
    """Standard output; rich itself honours NO_COLOR, TERM=dumb and COLUMNS."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Whoever pipes a table wants whole lines: grep and awk do the cutting.
    return PrintableConsole(highlight=False, width=240 if piped else None)


def configuration(config: Path | None) -> Config:
    """Read the configuration file. Raises ConfigError."""
    if config is None and os.geteuid() != 0 and not os.access(DEFAULT_PATH, os.R_OK):
        raise ConfigError(
            f"this command is for administrators: {getpass.getuser()} may not read {DEFAULT_PATH}. "
            "Every user may run `polluxctl jobs`, `top`, `web`, `explain`, `history` and `usage`"
        )
    return load_config(config or DEFAULT_PATH)


def open_store(config: Path | None) -> tuple[Store, PolicySettings]:
    """Return the store, not yet connected, and the default settings."""
    loaded = configuration(config)
    database = loaded.database
    store = Store(
        database.url,
        loaded.slurm.cluster,
        connect_timeout=database.connect_timeout_s,
        statement_timeout=database.statement_timeout_s,
    )
    return store, loaded.policy


def who() -> str:
    """Return who changes a setting: under sudo, the person behind it."""
    user = os.environ.get("SUDO_USER") or getpass.getuser()
    return f"{user}@{socket.gethostname()}"
