"""Read polluxd.toml, or name each faulty key.

`polluxd.config.settings` declares the sections and keys. `polluxd example-config` prints a file with every key.
"""

from __future__ import annotations

import difflib
import logging
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails
from sqlalchemy import make_url

from polluxd.config.setting_info import SettingInfo, declared, infos
from polluxd.config.settings import (
    SECTIONS,
    CycleSettings,
    DatabaseSettings,
    GatewaySettings,
    LogSettings,
    MetricsSettings,
    MoveSettings,
    PolicySettings,
    ScopeSettings,
    SlurmSettings,
)
from polluxd.errors import ConfigError
from polluxd.model import DaemonMode
from polluxd.slurm.topology import racks_of
from polluxd.store.transport import require_verified

log = logging.getLogger(__name__)

DEFAULT_PATH = Path("/etc/pollux/polluxd.toml")


class Config(BaseModel):
    """The whole file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, hide_input_in_errors=True, use_attribute_docstrings=True
    )

    mode: Annotated[DaemonMode, Field(strict=False)] = DaemonMode.OBSERVE
    """What polluxd does with decisions: `observe` records them, `advise` shows them, `enforce` acts on them."""
    slurm: SlurmSettings
    database: DatabaseSettings
    cycle: CycleSettings = CycleSettings()
    policy: PolicySettings = PolicySettings()
    moves: MoveSettings = MoveSettings()
    scope: ScopeSettings = ScopeSettings()
    log: LogSettings = LogSettings()
    metrics: MetricsSettings = MetricsSettings()
    gateway: GatewaySettings = GatewaySettings()

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.slurm.timeout_s >= self.cycle.leader_lease_s:
            raise ValueError(
                f"slurm.timeout_s ({self.slurm.timeout_s:g}) must be below cycle.leader_lease_s "
                f"({self.cycle.leader_lease_s:g}): a call must end before another polluxd may lead"
            )
        if self.slurm.lease_s < 2 * self.cycle.poll_s + self.slurm.timeout_s:
            raise ValueError(
                f"slurm.lease_s ({self.slurm.lease_s:g}) must be at least twice cycle.poll_s "
                f"({self.cycle.poll_s:g}) plus slurm.timeout_s ({self.slurm.timeout_s:g}): waiting jobs "
                "would start before polluxd renews their lease"
            )
        for conflict in self.policy.conflicts():
            raise ValueError(f"policy.{conflict}")
        try:
            racks_of(self.slurm.racks)
        except ValueError as error:
            raise ValueError(f"slurm.racks: {error}") from None
        return self


def mode() -> SettingInfo:
    """Return the one setting outside all sections."""
    schema = Config.model_json_schema()
    return declared("", {**schema, "properties": {"mode": schema["properties"]["mode"]}})[0]


def load_config(path: Path | str = DEFAULT_PATH) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: unreadable, not TOML, or unsound: one line per fault, with key, what was expected and what came.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            document = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; create it with `polluxd example-config > {path}`, "
            "or name another file with --config"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # tomllib's message gives line and column, and no text of the file.
        raise ConfigError(f"{path}: not TOML: {error}") from None
    config = parse_config(document, str(path))
    try:
        require_verified(make_url(config.database.url))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    if make_url(config.database.address).password and mode & 0o077:
        raise ConfigError(
            f"{path}: database.url holds a password and others may read the file (mode {mode:04o}): "
            f"run `chmod 600 {path}`, or use database.passfile"
        )
    return config


def parse_config(document: Mapping[str, Any], origin: str) -> Config:
    """Check a decoded document, named `origin`. Raises ConfigError."""
    faults = _not_in_the_file(document)
    try:
        config = Config.model_validate(document)
    except ValidationError as error:
        faults += [_fault(detail, document) for detail in error.errors(include_url=False)]
    if faults:
        raise ConfigError("\n".join(f"{origin}: {fault}" for fault in faults))
    return config


def _not_in_the_file(document: Mapping[str, Any]) -> list[str]:
    policy = document.get("policy")
    return [
        f"{info.name}: this setting is not kept in the file; use `{info.run_time_only}`"
        for info in infos("policy")
        if info.run_time_only and isinstance(policy, Mapping) and info.key in policy
    ]


def _fault(detail: ErrorDetails, document: Mapping[str, Any]) -> str:
    where = detail["loc"]
    key = ".".join(str(part) for part in where if part != "[key]")
    info = _setting(where)
    match detail["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"{key}: no such key{_nearest(where)}"
        case "missing":
            return f"{key}: missing; {_REQUIRED.get(key, 'it must be given')}"
        case "value_error" if info is None:
            message = detail["msg"].removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        case _ if info is not None:
            return f"{key}: expected {info.expected_at(where[2:])}{_came(where, document)}"
        case "enum":
            return f"{key}: expected {mode().expected}{_came(where, document)}"
        case _:
            return f"{key}: expected a table, [{key}]{_came(where, document)}"


_REQUIRED = {
    "slurm": 'a section [slurm] with cluster = "..." must be given',
    "slurm.cluster": "give the ClusterName of slurm.conf",
    "database": 'a section [database] with url = "postgresql://..." must be given',
    "database.url": "give postgresql://pollux_daemon@host/pollux",
}


def _setting(where: tuple[int | str, ...]) -> SettingInfo | None:
    """Return the setting at `where`, or None for a section or the whole file."""
    if len(where) < 2 or where[0] not in SECTIONS:
        return None
    return next((info for info in infos(str(where[0])) if info.key == where[1]), None)


def _nearest(where: tuple[int | str, ...]) -> str:
    """Suggest the key that was meant, among those of the same section."""
    if len(where) == 1:
        known = list(Config.model_fields)
    else:
        known = [info.key for info in infos(str(where[0])) if not info.run_time_only]
    close = difflib.get_close_matches(str(where[-1]), known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _came(where: tuple[int | str, ...], document: Mapping[str, Any]) -> str:
    """Quote the value in the file, unless it may be a secret."""
    value: Any = document
    for part in where:
        if not isinstance(value, Mapping) or part not in value:
            return ""
        value = value[part]
    if where[-1:] == ("url",) or isinstance(value, Mapping | list):
        return ""
    return f"; got {value!r}"
