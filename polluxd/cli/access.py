"""The start of every polluxctl command: options and arguments, terminal, store, user."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from polluxd.cli.output import PrintableConsole
from polluxd.config.config_file import DEFAULT_PATH, Config, load_config
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError, SlurmError
from polluxd.slurm.commands import Commands
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
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="begin: 24h, 7d, 2026-11-20, 2026-11-20T08:00")
]
JsonOption = Annotated[bool, typer.Option("--json", help="print JSON, unrounded")]

_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0}


def job_id(text: str) -> int:
    """Read a job id, or the ARRAY_TASK by which squeue names a task of an array. Raises typer.BadParameter."""
    if re.fullmatch(r"[0-9]{1,10}_[0-9]{1,9}", text):
        return _job_id_of_task(text)
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise typer.BadParameter(f"expected a job id such as 1234, or a task such as 1234_5, got {text!r}")
    return int(text)


def _job_id_of_task(text: str) -> int:
    """Ask Slurm which job is this task: slurmctld for as long as it shows the job, then accounting."""
    shown = list[str]()
    with suppress(SlurmError):  # it does not know the array any more
        words = ("--all", "--array", "--states=all", "--Format=JobID,ArrayTaskID")
        shown = Commands().ask("squeue", "--noheader", f"--jobs={text}", *words).split()
    if len(shown) == 2 and shown[1] == text.partition("_")[2]:
        return int(shown[0])
    try:
        lines = Commands().ask("sacct", "-nXP", f"--jobs={text}", "--format=JobIDRaw,JobID").splitlines()
        recorded = [line.split("|") for line in lines]
    except SlurmError as error:
        raise typer.BadParameter(f"squeue shows no job {text}, and sacct does not answer: {error}") from None
    if not recorded or recorded[-1][1:] != [text]:
        raise typer.BadParameter(f"neither squeue nor sacct shows a job {text}")
    return int(recorded[-1][0])


JobArgument = Annotated[int, typer.Argument(metavar="JOB", parser=job_id, help="Slurm job id, or ARRAY_TASK")]


def point(text: str, now: float, option: str) -> float:
    """Return a POSIX time: so long before now (`24h`, `7d`), or a local date (`2026-11-20`, `2026-11-20T08:00`).

    Raises typer.BadParameter, which names `option`.
    """
    if (found := re.fullmatch(r"(\d{1,6})([mhd])", text)) is not None:
        return now - int(found[1]) * _UNIT_S[found[2]]
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"expected a time such as 24h, 7d, 2026-11-20 or 2026-11-20T08:00, got {text!r}",
            param_hint=option,
        ) from None


def console() -> PrintableConsole:
    """Standard output; rich itself honours NO_COLOR, TERM=dumb and COLUMNS."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    # Whoever pipes a table wants whole lines: grep and awk do the cutting.
    return PrintableConsole(highlight=False, width=240 if piped else None)


def may_read_database(config: Path | None) -> bool:
    """Say whether this user may read polluxd's configuration."""
    return config is not None or os.access(DEFAULT_PATH, os.R_OK)


def whose(user: str | None, config: Path | None) -> str | None:
    """Return whose jobs to list; None: everybody's. Ordinary users see their own, unless they name another or `all`."""
    if user is None and not may_read_database(config):
        return getpass.getuser()
    return None if user == "all" else user


def configuration(config: Path | None) -> Config:
    """Read the configuration file. Raises ConfigError."""
    if os.geteuid() != 0 and not may_read_database(config):
        raise ConfigError(
            f"this command is for administrators: {getpass.getuser()} may not read {DEFAULT_PATH}. "
            "Every user may run `polluxctl jobs`, `top`, `web`, `explain`, `history` and `usage`"
        )
    return load_config(config or DEFAULT_PATH)


def open_store(config: Path | None) -> tuple[Store, PolicySettings]:
    """Return the store, not yet connected, and the default settings."""
    loaded = configuration(config)
    return Store(loaded.database.url, loaded.slurm.cluster, **loaded.database.waits), loaded.policy


def who() -> str:
    """Return who changes a setting: under sudo, the person behind it."""
    user = os.environ.get("SUDO_USER") or getpass.getuser()
    return f"{user}@{socket.gethostname()}"
