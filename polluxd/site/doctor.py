"""Every check of this machine, in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from polluxd.config.config_file import Config, load_config
from polluxd.errors import ConfigError, SlurmError
from polluxd.slurm.configuration import Slurm, settings_of

from . import database_checks, file_checks, slurm_checks, trials
from .findings import Finding, fault, ok
from .hooks import Role, Site


def examine(site: Site, roles: Sequence[Role], config_path: Path, *, named: bool) -> Iterator[Finding]:
    """Check this machine and what it reaches; a configuration that the user `named` must exist."""
    config, findings = _configuration(config_path, named or Role.CONTROLLER in roles)
    yield from findings
    if config is not None:
        yield from file_checks.configuration_files(config, config_path, site.user)
    if not findings or config is not None:  # what the hooks should say is known
        yield from file_checks.hook_files(site, roles)
    if Role.NODE in roles:
        yield from file_checks.gpu_devices(site)
    slurm = Slurm(site.slurm_conf if site.slurm_conf.exists() else None)
    try:
        settings = slurm.settings()
    except SlurmError:
        yield from slurm_checks.munge(slurm, settings_of(site.slurm_conf))
    else:
        yield from slurm_checks.munge(slurm, settings)
        if Role.CONTROLLER in roles:
            yield from slurm_checks.pace(settings, config)
            yield from trials.heartbeat(settings.get("SlurmUser", "").partition("(")[0], config)
            yield from trials.canary(slurm, site, config)
    yield from slurm_checks.cluster(slurm, site, config, roles)
    yield from slurm_checks.gateway(slurm, config)
    if config is not None:
        yield from database_checks.as_daemon(config)


def _configuration(path: Path, required: bool) -> tuple[Config | None, list[Finding]]:
    if not path.exists() and not required:
        return None, []
    try:
        config = load_config(path)
    except ConfigError as error:
        return None, [
            fault("configuration", str(error), "correct the file; `polluxd example-config` shows every key")
        ]
    return config, [ok("configuration", f"{path} is sound; mode {config.mode}")]
