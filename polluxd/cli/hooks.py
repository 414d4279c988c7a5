"""`polluxctl hooks`: install, check and remove what Slurm runs for Pollux."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from polluxd.config.config_file import DEFAULT_PATH, Config, load_config
from polluxd.errors import ConfigError, PolluxError
from polluxd.printable import printable
from polluxd.site import hooks
from polluxd.site.files import Difference, apply, differences
from polluxd.site.hooks import Role, Site

from .access import ConfigOption

app = typer.Typer(help="Install, check or remove Slurm's hooks.", no_args_is_help=True)

RoleOption = Annotated[
    list[Role] | None,
    typer.Option(
        "--role", "-r", help="of this machine; default: by the Slurm programs installed. Repeatable"
    ),
]
SlurmConfOption = Annotated[Path | None, typer.Option(help="slurm.conf [of polluxd.toml, else /etc/slurm]")]
FolderOption = Annotated[Path, typer.Option("--folder", help="Pollux' folder")]
UserOption = Annotated[str, typer.Option("--user", help="polluxd's user")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="do not ask")]

FOLDER = DEFAULT_PATH.parent


@app.command()
def install(
    role: RoleOption = None,
    slurm_conf: SlurmConfOption = None,
    folder: FolderOption = FOLDER,
    user: UserOption = "pollux",
    yes: YesOption = False,
    config: ConfigOption = None,
) -> None:
    """Install or update the hooks of this machine. Safe to repeat.

    Shows the changes first, and keeps a copy of every file of the site that it changes.
    """
    change = FileChange.to(site_of(configuration_of(config, folder), slurm_conf, folder, user), _roles(role))
    change.show()
    if change.found:
        _ask(yes)
    change.carry_out()
    if change.problems:
        raise typer.Exit(1)


@dataclass(frozen=True)
class FileChange:
    """What `install` does on this machine: shown first, and then carried out."""

    site: Site
    roles: tuple[Role, ...]
    found: list[Difference]
    problems: list[str]
    """What people must do themselves."""

    @classmethod
    def to(cls, site: Site, roles: tuple[Role, ...]) -> FileChange:
        """Look at the files, and change nothing. Raises ConfigError."""
        states, problems = hooks.wanted(site, roles)
        return cls(site, roles, differences(states), problems)

    def show(self) -> None:
        _show(self.found)

    def carry_out(self) -> None:
        """Write the files, and say what is left to do."""
        _apply(self.found, f"the hooks are installed ({', '.join(self.roles)})")
        for problem in self.problems:
            typer.echo(printable(f"to do: {problem}"))
        if self.found and Role.CONTROLLER in self.roles:
            _have_read_again(self.site)
            if any(d.wanted.path == self.site.slurm_conf for d in self.found):
                typer.echo(
                    "slurm.conf has changed: copy it to every machine, and restart slurmctld and slurmd"
                )


@app.command()
def update(slurm_conf: SlurmConfOption = None, folder: FolderOption = FOLDER) -> None:
    """Bring Pollux' own scripts to this version, and touch nothing else.

    Upgrades of the packages run it.
    """
    site = Site(slurm_conf or _slurm_conf(None), folder)
    found = differences(hooks.own_files(site))
    apply(found)
    if found:
        _have_read_again(site)
    typer.echo(f"{len(found)} scripts in {site.hooks} were updated")


@app.command()
def check(
    role: RoleOption = None,
    slurm_conf: SlurmConfOption = None,
    folder: FolderOption = FOLDER,
    user: UserOption = "pollux",
    config: ConfigOption = None,
) -> None:
    """Compare the hooks of this machine with those of this version.

    Exit status 1: something differs, or is to do.
    """
    site, roles = site_of(configuration_of(config, folder), slurm_conf, folder, user), _roles(role)
    states, problems = hooks.wanted(site, roles)
    found = differences(states)
    for difference in found:
        typer.echo(printable(f"{difference.wanted.path}: {difference.faults}"))
        _show_diff(difference)
    for problem in problems:
        typer.echo(printable(f"to do: {problem}"))
    if found or problems:
        raise typer.Exit(1)
    typer.echo(f"the hooks are installed and current ({', '.join(roles)})")


@app.command()
def remove(
    role: RoleOption = None,
    slurm_conf: SlurmConfOption = None,
    folder: FolderOption = FOLDER,
    user: UserOption = "pollux",
    yes: YesOption = False,
    config: ConfigOption = None,
) -> None:
    """Take Pollux' lines out of Slurm's files on this machine."""
    site = site_of(configuration_of(config, folder), slurm_conf, folder, user)
    states, problems = hooks.unwanted(site, _roles(role))
    found = differences(states)
    _show(found)
    if found:
        _ask(yes)
    _apply(found, "no file of Slurm names Pollux")
    for problem in problems:
        typer.echo(printable(f"to do: {problem}"))


def configuration_of(config: Path | None, folder: Path) -> Config | None:
    """Return polluxd.toml; None on machines without one. Raises ConfigError."""
    path = config or folder / DEFAULT_PATH.name
    return load_config(path) if config is not None or path.exists() else None


def site_of(loaded: Config | None, slurm_conf: Path | None, folder: Path, user: str) -> Site:
    """Return the site's files and settings."""
    return Site(
        slurm_conf=slurm_conf or _slurm_conf(loaded),
        pollux=folder,
        user=user,
        submit={} if loaded is None else _submit_settings(loaded),
    )


def _slurm_conf(loaded: Config | None) -> Path:
    if loaded is not None and loaded.slurm.conf is not None:
        return loaded.slurm.conf
    return Path(os.environ.get("SLURM_CONF", "/etc/slurm/slurm.conf"))


def _submit_settings(loaded: Config) -> dict[str, str | float]:
    found: dict[str, str | float] = {
        "gateway": ",".join(loaded.gateway.urls),
        "lease_s": loaded.slurm.lease_s,
    }
    if loaded.gateway.ca is not None:
        found["gateway_ca"] = str(loaded.gateway.ca)
    if loaded.slurm.heartbeat_file is not None:
        found["heartbeat_file"] = str(loaded.slurm.heartbeat_file)
    return found


def _roles(given: list[Role] | None) -> tuple[Role, ...]:
    return tuple(given) if given else hooks.roles_here()


def _show(found: list[Difference]) -> None:
    for difference in found:
        typer.echo(printable(f"{difference.wanted.path}: {difference.faults}"))
        if difference.wanted.kept:
            _show_diff(difference)


def _ask(yes: bool) -> None:
    """Raises PolluxError: the answer is no."""
    if not yes and not typer.confirm("apply?"):
        raise PolluxError("nothing was changed")


def _apply(found: list[Difference], done: str) -> None:
    """Write the files, and say `done`."""
    try:
        copies = apply(found)
    except ConfigError as error:
        raise PolluxError(str(error)) from None
    for copy in copies:
        typer.echo(f"kept: {copy}")
    typer.echo(done if found else f"nothing to change: {done}")


def _have_read_again(site: Site) -> None:
    """Have slurmctld load the hook again: it looks at the time of job_submit.lua, not of the file that changed."""
    script = site.slurm_conf.with_name("job_submit.lua")
    if script.exists():
        os.utime(script)


def _show_diff(difference: Difference) -> None:
    for line in difference.diff.splitlines():
        typer.echo(printable(line))
