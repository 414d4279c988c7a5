"""`polluxctl setup`: after packages of Pollux were installed or upgraded, bring the machine to their version."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Annotated

import typer
from sqlalchemy import make_url

from polluxd.config.config_file import Config
from polluxd.errors import PolluxError
from polluxd.site import hooks as site_hooks

from . import database, hooks
from .access import ConfigOption
from .doctor import doctor
from .hooks import FOLDER, FolderOption, SlurmConfOption, UserOption, YesOption

SERVICES = ("polluxd", "polluxd-gateway")
SLURM = ("slurmctld", "slurmd")


def setup(
    slurm_conf: SlurmConfOption = None,
    folder: FolderOption = FOLDER,
    user: UserOption = "pollux",
    config: ConfigOption = None,
    superuser: Annotated[
        str, typer.Option("--url", help="libpq connection of a superuser of PostgreSQL")
    ] = "",
    yes: YesOption = False,
) -> None:
    """Bring database, hooks and services of this machine to this version; then check. Safe to repeat.

    Run it as root after each installation or upgrade: on the controller, then on nodes and login hosts.
    Running jobs go on. Exit status 1: something is left to do, or a check found a fault.
    """
    loaded = hooks.configuration_of(config, folder)
    site, roles = hooks.site_of(loaded, slurm_conf, folder, user), site_hooks.roles_here()
    runs_here = loaded is not None and _property("polluxd", "LoadState") == "loaded"
    if loaded is not None:
        typer.echo(_of_database(loaded))
    if runs_here:
        typer.echo(f"services: {' and '.join(SERVICES)} are enabled and restarted")
    change = hooks.FileChange.to(site, roles)
    change.show()
    if not yes and not typer.confirm("apply?"):
        raise PolluxError("nothing was changed")
    if loaded is not None:
        _set_up_database(loaded, superuser, user)
    change.carry_out()
    conf = site.slurm_conf
    for unit in SLURM:
        if _started_before(unit, conf) and (yes or typer.confirm(f"restart {unit}, which reads {conf}?")):
            _systemctl("restart", unit)
            typer.echo(f"{unit} was restarted")
    if runs_here:
        _systemctl("enable", *SERVICES)
        _systemctl("restart", *SERVICES)
        typer.echo(f"{' and '.join(SERVICES)} run")
    try:
        doctor(slurm_conf=slurm_conf, folder=folder, user=user, config=config)
    except typer.Exit as done:
        raise typer.Exit(int(bool(change.problems) or done.exit_code != 0)) from None


def _of_database(loaded: Config) -> str:
    """Say what may change in the database."""
    url = make_url(loaded.database.address)
    where = "" if database.database_is_here(url) else f" on {url.host}"
    return (
        f"database {url.database}{where}: it, its roles and its schema are made or brought up to date; a role without "
        f"a password file gets a new password, in {loaded.database.passfile or database.PASSFILE} and "
        f"{loaded.gateway.passfile or database.GATEWAY_PASSFILE}"
    )


def _set_up_database(loaded: Config, superuser: str, user: str) -> None:
    """Make the database, or bring its schema up to date. On another machine, only its superuser can make it."""
    url = make_url(loaded.database.address)
    if not superuser and not database.database_is_here(url):
        try:
            database.migrate(loaded)
        except PolluxError as error:
            raise PolluxError(
                f"{error}: name the connection of a superuser of {url.host} with --url"
            ) from None
        return
    database.init(
        url=superuser or " ".join(["dbname=postgres", *([f"port={url.port}"] if url.port else [])]),
        database=url.database or "pollux",
        passfile=loaded.database.passfile or database.PASSFILE,
        user=user,
        gateway_passfile=loaded.gateway.passfile or database.GATEWAY_PASSFILE,
    )


def _started_before(unit: str, conf: Path) -> bool:
    """Whether the unit runs since before the file was last changed."""
    if not conf.exists() or _property(unit, "ActiveState") != "active":
        return False  # without a file, slurmd has its configuration from slurmctld
    since_boot_us = int(_property(unit, "ActiveEnterTimestampMonotonic"))
    return time.time() - time.monotonic() + since_boot_us / 1e6 < conf.stat().st_mtime


def _property(unit: str, name: str) -> str:
    return _systemctl("show", "--value", f"--property={name}", unit)


def _systemctl(*arguments: str) -> str:
    """Return what systemctl prints. Raises PolluxError."""
    try:
        done = subprocess.run(["systemctl", *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise PolluxError(
            f"systemctl cannot be run ({error.strerror}): start `polluxd` and `polluxd gateway` yourself"
        ) from None
    if done.returncode:
        raise PolluxError(f"systemctl {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done.stdout.strip()
