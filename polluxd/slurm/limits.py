"""Limits that Slurm's accounting sets on associations and QOSes.

Reads `scontrol --oneliner show assoc_mgr flags=assoc,qos`. Administrators choose the names in it. No name is taken for
a limit: each record is matched as a whole, and its limits stand behind its last name.

TRES are named as in Slurm, such as `gres/gpu`, `gres/gpu:a100`, `cpu` and `node`. Source: sacctmgr(1), Resource limits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from polluxd.errors import SlurmGarbled

_ASSOCIATION = re.compile(
    r"ClusterName=.* Account=(?P<account>.+) UserName=(?:.+\((?P<uid>\d{1,10})\))? Partition=(?P<partition>\S*) "
    r"Priority=\d+ ID=\d+ .* ParentAccount=(?:(?P<parent>.+)\(\d+\))? Lft=\d+ DefAssoc=\w+ (?P<limits>GrpJobs=.*)"
)
_QOS = re.compile(
    r"QOS=(?P<name>.+)\(\d+\) UsageRaw=\S+ (?P<limits>GrpJobs=.*?)Account Limits=(?P<accounts>.*)"
    r"User Limits=(?P<users>.*)"
)
_FIELD = re.compile(r"(\w+)=(\S*)")
_NUMBER = re.compile(r"(N|\d{1,18})(?:\((\d{1,18})(?:\.\d+)?\))?")
_MEMORY = re.compile(r"(\d{1,12})(?:\.\d+)?([KMGTP])")
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1 << 10, "T": 1 << 20, "P": 1 << 30}
_PER_ACCOUNT = re.compile(r"\{MaxJobsPA=(\S+) \S+ MaxSubmitJobsPA=(\S+) MaxTRESPA=(\S*)\}")
_PER_USER = re.compile(r"\{MaxJobsPU=(\S+) \S+ MaxSubmitJobsPU=(\S+) MaxTRESPU=(\S*)\}")

Tres = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """What all jobs of a group may hold together."""

    tres: Tres = field(default_factory=dict)
    jobs: int | None = None
    """Running jobs; None: no limit."""
    used_up: tuple[str, ...] = ()
    """Limits on past use that are reached, such as `GrpTRESMins=gres/gpu=1000`: Slurm starts no job."""
    submitted: int | None = None
    """Jobs that wait or run; None: no limit."""
    running_minutes: Tres = field(default_factory=dict)
    """What running jobs may still use until their time limits, together [minutes x TRES], by `GrpTRESRunMins=TRES`."""
    counted_minutes: Tres = field(default_factory=dict)
    """What Slurm counts of that now: a QOS's UsageFactor multiplies it."""


@dataclass(frozen=True, slots=True)
class JobLimits:
    """What each job may hold."""

    tres: Tres = field(default_factory=dict)
    wall_s: float | None = None
    """Longest time limit; None: no limit."""
    least: Tres = field(default_factory=dict)
    """The least that a job must ask for (MinTRES of a QOS)."""
    minutes: Tres = field(default_factory=dict)
    """What a job may use within its time limit [minutes x TRES]."""
    per_node: Tres = field(default_factory=dict)
    """What a job may hold on each node."""


@dataclass(frozen=True, slots=True)
class Association:
    """The limits of an account, or of a user in an account."""

    account: str
    uid: int | None
    """None: the account itself."""
    partition: str
    """Empty: all."""
    parent: str
    """The parent account of an account; empty for the root and for users."""
    group: GroupLimits
    job: JobLimits
    jobs: int | None = None
    """Running jobs of the user in this account; None: no limit."""
    submitted: int | None = None
    """Jobs of the user in this account that wait or run; None: no limit."""


@dataclass(frozen=True, slots=True)
class Qos:
    """The limits of a QOS."""

    name: str
    group: GroupLimits
    job: JobLimits
    per_user: GroupLimits = field(default_factory=GroupLimits)
    per_account: GroupLimits = field(default_factory=GroupLimits)


@dataclass(frozen=True, slots=True)
class Limits:
    """All limits that Slurm enforces; empty where it enforces none."""

    associations: Mapping[tuple[str, int | None, str], Association] = field(default_factory=dict)
    """By account, uid and partition."""
    qos: Mapping[str, Qos] = field(default_factory=dict)


def parse_limits(text: str, *, safe: bool = False) -> tuple[Limits, dict[str, str]]:
    """Read the limits, and why some records could not be understood.

    Args:
        safe: AccountingStorageEnforce has `safe`: no job starts that could use more than GrpTRESMins has left.

    A record that makes no sense sets no limit: Slurm still enforces it, and polluxd learns from the refusal.

    Raises:
        SlurmGarbled: the answer is no answer of `show assoc_mgr`, or is cut off.
    """
    if "Association Manager state" not in text or not text.endswith("\n"):
        raise SlurmGarbled(f"expected the state of the association manager, got {text[:80]!r}")
    associations: dict[tuple[str, int | None, str], Association] = {}
    qos: dict[str, Qos] = {}
    senseless: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        try:
            if line.startswith("ClusterName="):
                one = _association(line, safe=safe)
                associations[one.account, one.uid, one.partition] = one
            elif line.startswith("QOS="):
                other = _qos(line, safe=safe)
                qos[other.name] = other
        except SlurmGarbled as error:
            senseless[f"limits, line {number}"] = str(error)
    return Limits(associations, qos), senseless


def _association(line: str, *, safe: bool) -> Association:
    found = _ASSOCIATION.fullmatch(line.rstrip())
    if found is None:
        raise SlurmGarbled(f"expected the record of an association, got {line[:80]!r}")
    fields = dict(_FIELD.findall(found["limits"]))
    return Association(
        found["account"],
        int(found["uid"]) if found["uid"] else None,
        found["partition"],
        found["parent"] or "",
        _group(fields, safe=safe),
        _per_job(fields),
        _number(fields.get("MaxJobs", "")),
        _number(fields.get("MaxSubmitJobs", "")),
    )


def _qos(line: str, *, safe: bool) -> Qos:
    found = _QOS.fullmatch(line.rstrip())
    if found is None:
        raise SlurmGarbled(f"expected the record of a QOS, got {line[:80]!r}")
    fields = dict(_FIELD.findall(found["limits"]))
    return Qos(
        found["name"],
        _group(fields, safe=safe),
        _per_job(fields),
        _of_each(_PER_USER, found["users"]),
        _of_each(_PER_ACCOUNT, found["accounts"]),
    )


def _of_each(pattern: re.Pattern[str], text: str) -> GroupLimits:
    """The limits of each user or account of a QOS, which are the same for all.

    Slurm shows them with the use of each one that has jobs; without jobs they limit nothing yet.
    """
    one = pattern.search(text)
    if one is None:
        return GroupLimits()
    return GroupLimits(_tres(one[3])[0], _number(one[1]), submitted=_number(one[2]))


def _group(fields: Mapping[str, str], *, safe: bool) -> GroupLimits:
    minutes, used = _tres(fields.get("GrpTRESMins", ""))
    used_up = [f"GrpTRESMins={name}={most}" for name, most in minutes.items() if used.get(name, 0) >= most]
    most, counted = _tres(fields.get("GrpTRESRunMins", ""))
    running = {f"GrpTRESRunMins={name}": value for name, value in most.items()}
    if safe:
        running |= {f"GrpTRESMins={name}": max(0, most - used.get(name, 0)) for name, most in minutes.items()}
    wall = _NUMBER.fullmatch(fields.get("GrpWall", ""))
    if wall and wall[1] != "N" and int(wall[2] or 0) >= int(wall[1]):
        used_up.append(f"GrpWall={wall[1]}")
    return GroupLimits(
        _tres(fields.get("GrpTRES", ""))[0],
        _number(fields.get("GrpJobs", "")),
        tuple(used_up),
        _number(fields.get("GrpSubmitJobs", "")),
        running,
        {name: counted.get(name, 0) for name in most},
    )


def _per_job(fields: Mapping[str, str]) -> JobLimits:
    minutes = _number(fields.get("MaxWallPJ", ""))
    return JobLimits(
        _tres(fields.get("MaxTRESPJ", ""))[0],
        None if minutes is None else 60.0 * minutes,
        _tres(fields.get("MinTRESPJ", ""))[0],
        _tres(fields.get("MaxTRESMinsPJ", ""))[0],
        _tres(fields.get("MaxTRESPN", ""))[0],
    )


def _number(text: str) -> int | None:
    """The limit in `7(1)`, limit and use; None for `N(1)` and nothing."""
    if not text:
        return None
    found = _NUMBER.fullmatch(text)
    if found is None:
        raise SlurmGarbled(f"expected a limit such as 7(1) or N(1), got {text[:40]!r}")
    return None if found[1] == "N" else int(found[1])


def _tres(text: str) -> tuple[dict[str, int], dict[str, int]]:
    """Limits and present use in `cpu=N(1),gres/gpu=5(2)`; memory in MB."""
    limits: dict[str, int] = {}
    used: dict[str, int] = {}
    for item in filter(None, text.split(",")):
        name, _, value = item.rpartition("=")
        found = _NUMBER.fullmatch(value)
        if not name:
            raise SlurmGarbled(f"expected TRES such as gres/gpu=5(2), got {item[:40]!r}")
        if found is None:
            # Limits of a single job are shown with a unit, such as mem=4G.
            if name == "mem" and (memory := _MEMORY.fullmatch(value)):
                limits[name] = int(int(memory[1]) * _MEGABYTES[memory[2]])
            continue
        if found[1] != "N":
            limits[name] = int(found[1])
        used[name] = int(found[2] or 0)
    return limits, used
