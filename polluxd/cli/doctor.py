"""`polluxctl doctor`: what is wrong with an installation, and what to do."""

from __future__ import annotations

from dataclasses import asdict

import typer

from polluxd.config.config_file import DEFAULT_PATH
from polluxd.errors import ConfigError
from polluxd.printable import printable
from polluxd.site import hooks as site_hooks
from polluxd.site.doctor import examine
from polluxd.site.findings import Finding, Level

from .access import ConfigOption, JsonOption
from .hooks import FOLDER, FolderOption, RoleOption, SlurmConfOption, UserOption, configuration_of, site_of
from .output import emit_json


def doctor(
    role: RoleOption = None,
    slurm_conf: SlurmConfOption = None,
    folder: FolderOption = FOLDER,
    user: UserOption = "pollux",
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine's installation; run it as root.

    Exit status: 0 no fault, 1 a fault. A warning changes nothing.
    """
    path = config or folder / DEFAULT_PATH.name
    try:
        loaded = configuration_of(config, folder)
    except ConfigError:  # `examine` says why
        loaded = None
    site = site_of(loaded, slurm_conf, folder, user)
    found: list[Finding] = []
    roles = tuple(role) if role else site_hooks.roles_here()
    for finding in examine(site, roles, path, named=config is not None):
        found.append(finding)
        if not as_json:
            print_finding(finding)
    if as_json:
        emit_json([asdict(finding) for finding in found])
    else:
        faults = sum(finding.level is Level.FAULT for finding in found)
        warnings = sum(finding.level is Level.WARNING for finding in found)
        typer.echo(f"{', '.join(roles)}: {faults} faults, {warnings} warnings")
    raise typer.Exit(int(any(finding.level is Level.FAULT for finding in found)))


def print_finding(finding: Finding) -> None:
    label = finding.level.upper() if finding.level is Level.FAULT else finding.level
    typer.echo(printable(f"{label:<8} {finding.check}: {finding.result}"))
    if finding.remedy:
        typer.echo(printable(f"{'':<8} remedy: {finding.remedy}"))
