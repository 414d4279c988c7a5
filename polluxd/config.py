"""The configuration file: TOML in, frozen values out, or an error that names each faulty key.

mode = "observe" | "advise" | "enforce"
[slurm] [database] [cycle] [policy] [realloc]           see contrib/systemd/polluxd.toml, with every key
"""

from __future__ import annotations

import difflib
import math
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from polluxd.errors import ConfigError
from polluxd.gpu_counts import RULES, is_rule
from polluxd.model import Mode, Settings
from polluxd.slurm.topology import racks_of

DEFAULT_PATH = Path("/etc/pollux/polluxd.toml")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Weight = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gpus = Annotated[int, Field(ge=0)]


class _Section(BaseModel):
    # Strict: `"60"` for a number, or 1 for true, is a slip of the pen that should be told, not guessed at.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class Slurm(_Section):
    """The cluster, and how to talk to it."""

    cluster: str = Field(pattern=r"^[^:\s]{1,64}$")
    """ClusterName of slurm.conf."""
    conf: Annotated[Path | None, Field(strict=False)] = None
    """slurm.conf; None: where Slurm's commands look by themselves."""
    client: Literal["auto", "scontrol", "pyslurm"] = "auto"
    """What Slurm is read through; auto: pyslurm where it is installed and of Slurm's version, else scontrol."""
    timeout_s: Seconds = 10.0
    """Longest wait for one Slurm command."""
    lease_s: Seconds = 300.0
    """For how long a waiting job is kept back at a time; polluxd dead, it starts by itself after this."""
    heartbeat_file: Annotated[Path | None, Field(strict=False)] = None
    """Touched every cycle; the submit hook keeps jobs back only while it is fresh."""
    racks: dict[str, str] = Field(default_factory=dict)
    """Node lists by rack, for nodes that Slurm's own topology does not place."""

    gpu_speeds: dict[str, Weight] = Field(default_factory=dict)
    """How fast the GPU types compute, relative to one another; a type not named is explored by trying it."""

    @field_validator("racks")
    @classmethod
    def _are_apart(cls, value: dict[str, str]) -> dict[str, str]:
        racks_of(value)
        return value


class Database(_Section):
    """Postgres."""

    address: str = Field(alias="url", repr=False)
    passfile: Annotated[Path | None, Field(strict=False)] = None
    """libpq's password file, mode 0600: keeps the password out of this file."""
    secret_file: Annotated[Path | None, Field(strict=False)] = None
    """The secret that signs the jobs' tickets, the same on every node's prolog."""
    connect_timeout_s: Seconds = 3.0
    statement_timeout_s: Seconds = 5.0
    history_days: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 14.0
    """Reports and cycles older than this are forgotten."""

    @field_validator("address")
    @classmethod
    def _is_postgres(cls, value: str) -> str:
        try:
            backend = make_url(value).get_backend_name()
        except ArgumentError:
            backend = ""
        if backend != "postgresql":
            raise ValueError("expected a URL such as postgresql://pollux_daemon@db.example.org/pollux")
        return value

    @property
    def url(self) -> str:
        """SQLAlchemy URL, with the password file in it where there is one. Holds a secret: do not print."""
        if self.passfile is None:
            return self.address
        query = {"passfile": str(self.passfile)}
        return make_url(self.address).update_query_dict(query).render_as_string(hide_password=False)

    def secret(self) -> bytes | None:
        """The ticket secret, None where no file is named. Raises ConfigError."""
        if self.secret_file is None:
            return None
        try:
            # Stripped, as the prolog does: an editor's last newline is no part of it.
            secret = self.secret_file.read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"database.secret_file {self.secret_file}: {error.strerror}") from None
        if len(secret) < 16:
            raise ConfigError(
                f"database.secret_file {self.secret_file}: expected a secret of at least 16 bytes, "
                f"got {len(secret)}; `openssl rand -hex 32` makes one"
            )
        return secret


class Cycle(_Section):
    """How often."""

    interval_s: Seconds = 60.0
    """Between decisions."""
    floor_s: Seconds = 10.0
    """Never decide more often, whatever arrives or ends."""
    poll_s: Seconds = 5.0
    """Between looks at Slurm when nothing is under way."""
    busy_poll_s: Seconds = 1.0
    """The same while a move is under way."""
    leader_lease_s: Seconds = 15.0
    """How long a leader may act without hearing from the database; a standby waits as long after a crash."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.floor_s > self.interval_s:
            raise ValueError(f"floor_s ({self.floor_s:g}) must not be above interval_s ({self.interval_s:g})")
        if self.busy_poll_s > self.poll_s:
            raise ValueError(f"busy_poll_s ({self.busy_poll_s:g}) must not be above poll_s ({self.poll_s:g})")
        return self


class Policy(_Section):
    """What holds until `polluxctl` sets something else."""

    power: Annotated[float, Field(le=1)] = -1.0
    partial_nodes: bool = False
    account_weights: dict[str, Weight] = Field(default_factory=dict)
    user_weights: dict[str, Weight] = Field(default_factory=dict)
    qos_weights: dict[str, Weight] = Field(default_factory=dict)
    """By Slurm's QOS."""
    account_ceilings: dict[str, Gpus] = Field(default_factory=dict)
    """Most GPUs that an account's jobs may hold together."""
    user_ceilings: dict[str, Gpus] = Field(default_factory=dict)
    account_guarantees: dict[str, Gpus] = Field(default_factory=dict)
    """GPUs kept for an account's jobs whenever they can use them."""
    user_guarantees: dict[str, Gpus] = Field(default_factory=dict)
    gpu_counts: str = "any"
    """Numbers of GPUs that any job may be given."""
    starvation_bound: Seconds | None = None
    """A job that has waited for longer goes before all others."""
    remaining_work_power: Annotated[float, Field(ge=-4, le=4, allow_inf_nan=False)] = -0.25
    """Exponent of remaining work in a job's weight: jobs near their end come first, within bounds."""
    hysteresis: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.05
    """A running job moves only where its predicted goodput rises by more than this share."""

    @field_validator("power")
    @classmethod
    def _is_number(cls, value: float) -> float:
        if math.isnan(value):
            raise ValueError("expected a number up to 1, or -inf for max-min fairness")
        return value

    @field_validator("gpu_counts")
    @classmethod
    def _is_rule(cls, value: str) -> str:
        if not is_rule(value):
            raise ValueError(f"expected {RULES}")
        return value

    @model_validator(mode="after")
    def _within_ceilings(self) -> Self:
        for kind, floors, ceilings in (
            ("account", self.account_guarantees, self.account_ceilings),
            ("user", self.user_guarantees, self.user_ceilings),
        ):
            for name, gpus in floors.items():
                if gpus > ceilings.get(name, gpus):
                    raise ValueError(
                        f"{kind}_guarantees.{name} ({gpus}) must not be above {kind}_ceilings.{name} "
                        f"({ceilings[name]})"
                    )
        return self

    def settings(self) -> Settings:
        """As defaults for `Store.settings`."""
        return Settings(**self.model_dump())


class Realloc(_Section):
    """Bounds on moving jobs."""

    cooldown_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """A moved job is left alone for this long."""
    max_concurrent: Annotated[int, Field(ge=0)] = 0
    """Moves under way at one time; 0: no limit."""
    moves_per_hour: Annotated[int, Field(ge=0)] = 0
    """Running jobs ordered to end their processes within an hour, of the whole cluster; 0: no limit. A resize in place
    costs little, and is not counted."""
    default_cost_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 30.0
    """What a move is expected to cost until a job's own moves are measured (the paper's constant)."""
    default_resize_cost_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2.0
    """The same, of a job that holds whole nodes and can be resized in place."""
    paths: Annotated[tuple[Literal["resize", "relaunch", "requeue"], ...], Field(strict=False)] = (
        "resize",
        "relaunch",
        "requeue",
    )
    """How running jobs may be moved; the fastest that a job is able to is taken."""
    planned_timeout_s: Seconds = 60.0
    """GPUs of the target did not come free."""
    drain_timeout_s: Seconds = 30.0
    """No checkpoint was acknowledged."""
    requeued_timeout_s: Seconds = 120.0
    """GPUs did not come free for a requeued job."""
    start_timeout_s: Seconds = 30.0
    """Placed, and not started by Slurm."""
    training_timeout_s: Seconds = 120.0
    """Running (or resized), and no training step reported."""
    recruit_timeout_s: Seconds = 60.0
    """Told to grow in place, and no companion job submitted."""
    give_back_timeout_s: Seconds = 60.0
    """Shrunk in place, and its nodes not taken back by Slurm."""

    @field_validator("paths")
    @classmethod
    def _has_the_last_resort(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if "requeue" not in value or len(set(value)) != len(value):
            raise ValueError(
                'expected each path once, and "requeue" among them: every job can be moved by it'
            )
        return value


class Config(_Section):
    """The whole file."""

    mode: Annotated[Mode, Field(strict=False)] = Mode.OBSERVE
    slurm: Slurm
    database: Database
    cycle: Cycle = Cycle()
    policy: Policy = Policy()
    realloc: Realloc = Realloc()

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
                f"({self.cycle.poll_s:g}) and one slurm.timeout_s ({self.slurm.timeout_s:g}): waiting jobs "
                "would start before polluxd renews their lease"
            )
        return self


def load_config(path: Path | str = DEFAULT_PATH) -> Config:
    """Read and check a configuration file.

    Raises:
        ConfigError: unreadable, not TOML, or not sound: key, what was expected, what came, a line per fault.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            document = tomllib.load(file)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such file; copy contrib/systemd/polluxd.toml there, or name another with --config"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # tomllib's message gives line and column, and no text of the file.
        raise ConfigError(f"{path}: not TOML: {error}") from None
    config = parse_config(document, str(path))
    if make_url(config.database.address).password and mode & 0o077:
        raise ConfigError(
            f"{path}: database.url holds a password and others may read the file (mode {mode:04o}): "
            f"`chmod 600 {path}`, or use database.passfile"
        )
    return config


def parse_config(document: Mapping[str, Any], origin: str) -> Config:
    """Check a decoded document; `origin` names it in messages. Raises ConfigError."""
    try:
        return Config.model_validate(document)
    except ValidationError as error:
        faults = [f"{origin}: {_fault(detail, document)}" for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(faults)) from None


def _fault(detail: ErrorDetails, document: Mapping[str, Any]) -> str:
    where = [str(part) for part in detail["loc"]]
    key = ".".join(where) or "the file"
    match detail["type"]:
        case "extra_forbidden":
            return f"{key}: no such key{_nearest(where)}"
        case "missing":
            return f"{key}: missing; {_REQUIRED.get(key, 'it must be given')}"
        case _:
            what = detail["msg"].removeprefix("Value error, ").replace("Input should", "should")
            return f"{key}: {what}{_came(where, document)}"


_REQUIRED = {
    "slurm": 'a section [slurm] with cluster = "..." must be given',
    "slurm.cluster": "give the ClusterName of slurm.conf",
    "database": 'a section [database] with url = "postgresql://..." must be given',
    "database.url": "give postgresql://pollux_daemon@host/pollux",
}


def _nearest(where: list[str]) -> str:
    """Hint at the key that was meant, among those of the same section."""
    section: Any = Config
    for part in where[:-1]:
        field = section.model_fields.get(part) if hasattr(section, "model_fields") else None
        section = field.annotation if field is not None else None
    if section is None or get_origin(section) is not None:
        return ""
    known = [field.alias or name for name, field in section.model_fields.items()]
    close = difflib.get_close_matches(where[-1], known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; there are {', '.join(known)}"


def _came(where: list[str], document: Mapping[str, Any]) -> str:
    """What the file has at that key, unless it might be a secret or is a whole section."""
    value: Any = document
    for part in where:
        if not isinstance(value, Mapping) or part not in value:
            return ""
        value = value[part]
    if where[-1:] == ["url"] or isinstance(value, Mapping | list):
        return ""
    return f"; got {value!r}"
