"""Slurm's rules on where jobs start: partitions, reservations, licenses.

Reads `scontrol --oneliner show partition|reservation|licenses` with SLURM_TIME_FORMAT=%s. Administrators write these
records, users do not. A record that makes no sense forbids: a partition counts as down, a reservation as for all nodes
and all time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import floor, inf

from polluxd.errors import SlurmGarbled
from polluxd.slurm.notation import duration, node_names

_FIELD = re.compile(r"(?:^|\s)([A-Za-z]\w*)=(\S*)")
_PERIODS = {"DAILY": 86400.0, "WEEKDAY": 86400.0, "WEEKEND": 86400.0, "WEEKLY": 604800.0, "HOURLY": 3600.0}
_MARGIN_S = 60.0
"""Slurm counts time limits in whole minutes, and a start takes some seconds."""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition (slurm.conf(5))."""

    name: str
    state: str
    """UP, DOWN (starts nothing), DRAIN (accepts nothing, starts what it has) or INACTIVE (neither)."""
    nodes: frozenset[str]
    max_nodes: int | None = None
    max_time_s: float | None = None
    allowed: tuple[tuple[str, frozenset[str]], ...] = ()
    """Fields that admit jobs by account or QOS, such as (`AllowAccounts`, {lab}); none where all are admitted."""
    qos: str = ""
    """The QOS that limits the whole partition."""
    tier: int = 1
    """PriorityTier: Slurm starts jobs of the highest first."""
    exclusive: bool = False
    """Jobs have their nodes to themselves (OverSubscribe=EXCLUSIVE; with ExclusiveUser=YES jobs of one user could
    share, which polluxd does not use)."""
    min_nodes: int = 1
    """Fewest nodes of a job."""
    cpus_per_gpu: int | None = None
    """DefCpuPerGPU; None: not set here."""
    memory_per_gpu_mb: int | None = None
    """DefMemPerGPU; None: not set here."""

    @property
    def starts(self) -> bool:
        """Whether Slurm starts jobs there."""
        return self.state in ("UP", "DRAIN")

    def refuses(self, account: str, qos: str, time_s: float) -> str:
        """Return the field that keeps a job out that would start with this time limit; empty where none does."""
        names = {"AllowAccounts": account, "DenyAccounts": account, "AllowQos": qos, "DenyQos": qos}
        for key, members in self.allowed:
            if (names[key] in members) is key.startswith("Deny"):
                return f"{key} of partition {self.name}"
        if self.max_time_s is not None and time_s > self.max_time_s:
            return f"MaxTime of partition {self.name}"
        return ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Nodes that are kept for others from `start` to `end` [POSIX s], and again each `period` seconds (0: once)."""

    name: str
    start: float
    end: float
    nodes: frozenset[str] | None
    """None: all."""
    period: float = 0.0
    users: frozenset[str] = frozenset()
    """Who may use it; with a "-" before each name, who may not; empty: whoever its accounts say."""

    def admits(self, user: str) -> bool:
        denies = not self.users or any(name.startswith("-") for name in self.users)
        return f"-{user}" not in self.users if denies else user in self.users

    def meets(self, begin: float, end: float) -> bool:
        """Whether a job that runs from `begin` to `end` would run into it."""
        if not self.period:
            return begin < self.end and end > self.start
        # The first occurrence that ends after `begin`.
        past = max(0, floor((begin - self.end) / self.period) + 1)
        return end > self.start + past * self.period


@dataclass(frozen=True, slots=True)
class Rules:
    """What Slurm allows now; a partition not named here forbids nothing."""

    partitions: Mapping[str, Partition] = field(default_factory=dict)
    reservations: tuple[Reservation, ...] = ()
    licenses: Mapping[str, int] = field(default_factory=dict)
    """Free licenses by name."""
    preempts: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By QOS: the QOSes whose running jobs its jobs may preempt. Empty where PreemptType is not preempt/qos."""

    def named(self, partition: str) -> list[Partition]:
        """Return the partitions that a `--partition` names, as far as they are known."""
        return [self.partitions[name] for name in partition.split(",") if name in self.partitions]

    def forbidden(self, job_end: float, now: float, own: str = "") -> dict[str, Reservation]:
        """Nodes on which a job that starts now would meet a reservation.

        The job ends at `job_end` [POSIX s]. `own` is the reservation that it asks for. `*` stands for all nodes.
        """
        found: dict[str, Reservation] = {}
        for reservation in self.reservations:
            if reservation.name != own and reservation.meets(now, job_end + _MARGIN_S):
                names = reservation.nodes if reservation.nodes is not None else ("*",)
                found.update((name, reservation) for name in names if name not in found)
        return found

    def reserved(self, name: str, user: str, now: float) -> frozenset[str] | None:
        """Nodes of a reservation that has begun; None: all.

        Empty before its start, after its end, for users that it keeps out, and where Slurm knows no such reservation.
        """
        for one in self.reservations:
            if one.name == name and one.start <= now < one.end and one.admits(user):
                return one.nodes
        return frozenset()


def parse_partitions(text: str) -> tuple[dict[str, Partition], dict[str, str]]:
    """Read all partitions, and why some could not be understood."""
    found: dict[str, Partition] = {}
    unreadable: dict[str, str] = {}
    for fields in _records(text, "PartitionName", "No partitions"):
        name = fields["PartitionName"]
        try:
            found[name] = _partition(name, fields)
        except (SlurmGarbled, KeyError) as error:
            unreadable[f"partition {name}"] = _why(error)
            found[name] = Partition(name, "not understood", frozenset())
    return found, unreadable


def _partition(name: str, fields: Mapping[str, str]) -> Partition:
    most = fields.get("MaxNodes", "UNLIMITED")
    admits = [
        (key, frozenset(fields[key].split(",")))
        for key in ("AllowAccounts", "DenyAccounts", "AllowQos", "DenyQos")
        if fields.get(key, "ALL") != "ALL"
    ]
    return Partition(
        name,
        fields["State"],
        frozenset(node_names(fields["Nodes"])),
        None if most == "UNLIMITED" else int(_digits("MaxNodes", most)),
        duration(fields.get("MaxTime", "UNLIMITED")),
        tuple(admits),
        "" if fields.get("QoS", "N/A") == "N/A" else fields["QoS"],
        int(_digits("PriorityTier", fields.get("PriorityTier", "1"))),
        fields.get("OverSubscribe") == "EXCLUSIVE" or fields.get("ExclusiveUser") == "YES",
        max(int(_digits("MinNodes", fields.get("MinNodes", "1"))), 1),
        gpu_default("DefCpuPerGPU", fields.get("JobDefaults", "")),
        gpu_default("DefMemPerGPU", fields.get("JobDefaults", "")),
    )


def gpu_default(name: str, job_defaults: str) -> int | None:
    """Return a default of a JobDefaults= list, such as DefMemPerGPU; None where it is not set."""
    found = re.search(rf"{name}=(\d{{1,9}})", job_defaults, re.IGNORECASE)
    return int(found[1]) if found else None


def parse_preemption(text: str) -> dict[str, frozenset[str]]:
    """Read which QOS preempts which. Raises SlurmGarbled.

    The text is the answer of `sacctmgr --parsable2 show qos format=name,preempt`.
    """
    found = {}
    for line in filter(None, text.split("\n")):
        name, bar, others = line.rpartition("|")
        if not bar:
            raise SlurmGarbled(f"expected a QOS and those that it preempts, got {line[:80]!r}")
        if others:
            found[name] = frozenset(others.split(","))
    return found


def parse_licenses(text: str) -> dict[str, int]:
    """Read the free licenses by name. Raises SlurmGarbled."""
    found = {}
    for fields in _records(text, "LicenseName", "No licenses"):
        free = int(_digits("Free", fields.get("Free", "")))
        found[fields["LicenseName"]] = max(0, free - int(_digits("Reserved", fields.get("Reserved", "0"))))
    return found


def parse_reservations(text: str) -> tuple[tuple[Reservation, ...], dict[str, str]]:
    """Read all reservations, and why some could not be understood."""
    found: list[Reservation] = []
    unreadable: dict[str, str] = {}
    for fields in _records(text, "ReservationName", "No reservations"):
        name = fields["ReservationName"]
        try:
            found.append(_reservation(name, fields))
        except (SlurmGarbled, KeyError) as error:
            unreadable[f"reservation {name}"] = _why(error)
            found.append(Reservation(name, 0.0, inf, None))
    return tuple(found), unreadable


def _reservation(name: str, fields: Mapping[str, str]) -> Reservation:
    flags = fields.get("Flags", "").split(",")
    period = max((_PERIODS[flag] for flag in flags if flag in _PERIODS), default=0.0)
    # A floating reservation begins so many minutes from now, always.
    start = 0.0 if "TIME_FLOAT" in flags else _time(fields, "StartTime")
    end = inf if "TIME_FLOAT" in flags else _time(fields, "EndTime")
    users = frozenset(fields.get("Users", "(null)").split(",")) - {"(null)"}
    return Reservation(name, start, end, frozenset(node_names(fields["Nodes"])), period, users)


def _records(text: str, first: str, none: str) -> list[dict[str, str]]:
    stripped = text.strip()
    if not stripped or stripped.startswith(none):
        return []
    if not text.endswith("\n"):
        raise SlurmGarbled(f"scontrol's answer is cut off: it ends in {text[-40:]!r}")
    records = []
    for line in filter(None, map(str.strip, text.split("\n"))):
        if not re.match(rf"{first}=\S+", line):
            raise SlurmGarbled(f"expected a record that starts with {first}=, got {line[:80]!r}")
        fields: dict[str, str] = {}
        for key, value in _FIELD.findall(line):
            fields.setdefault(key, value)
        records.append(fields)
    return records


def _time(fields: Mapping[str, str], key: str) -> float:
    return float(_digits(key, fields[key]))


def _digits(key: str, text: str) -> str:
    if not re.fullmatch(r"\d{1,18}", text):
        raise SlurmGarbled(f"expected {key} as a whole number, got {text[:40]!r}")
    return text


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, SlurmGarbled) else f"its record has no {error}"
