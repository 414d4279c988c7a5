"""Limit the GPUs that the jobs of an account or a user hold together.

A ceiling is the most GPUs that they may hold. A guarantee is the number of GPUs that they must be able to hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polluxd.config.settings import PolicySettings
from polluxd.model import GpuLimit, SnapshotJob

NO_CEILING = 1 << 40


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that share a limit, by number, and the limit in GPUs."""

    name: str
    members: tuple[int, ...]
    floor: int
    ceiling: int

    def less(self, held: int) -> Group:
        """The group's limits once `held` GPUs of it are given for good."""
        return Group(self.name, self.members, max(self.floor - held, 0), max(self.ceiling - held, 0))


def groups(
    jobs: Sequence[SnapshotJob], settings: PolicySettings, capacity: int, limits: Sequence[GpuLimit] = ()
) -> tuple[Group, ...]:
    """The groups that the settings limit, users before accounts; then Slurm's.

    Guarantees beyond the capacity are cut, in order of name; one above its own ceiling is held to it.
    """
    found: list[Group] = []
    for kind, keys, floors, ceilings in (
        ("user", [j.user for j in jobs], settings.user_guarantees, settings.user_ceilings),
        ("account", [j.account for j in jobs], settings.account_guarantees, settings.account_ceilings),
    ):
        found += _of_kind(kind, keys, floors, ceilings, capacity)
    number = {job.job_id: j for j, job in enumerate(jobs)} if limits else {}
    for limit in limits:
        members = tuple(sorted(number[job_id] for job_id in limit.jobs if job_id in number))
        if members and limit.gpus < capacity:
            found.append(Group(limit.rule, members, 0, max(limit.gpus, 0)))
    return tuple(found)


def _of_kind(
    kind: str, keys: list[str], floors: Mapping[str, int], ceilings: Mapping[str, int], capacity: int
) -> list[Group]:
    found, left = [], capacity
    members: dict[str, list[int]] = {}
    for j, key in enumerate(keys):
        members.setdefault(key, []).append(j)
    for name in sorted(members.keys() & {*floors, *ceilings}):
        ceiling = max(ceilings.get(name, NO_CEILING), 0)
        floor = min(max(floors.get(name, 0), 0), ceiling, left)
        left -= floor
        found.append(Group(f"{kind} {name}", tuple(members[name]), floor, ceiling))
    return found


def nested(groups: Sequence[Group]) -> bool:
    """Return whether any two groups are disjoint or one contains the other.

    The exact solver needs groups of this form.
    """
    sets = [frozenset(g.members) for g in groups]
    return all(a <= b or b <= a or a.isdisjoint(b) for number, a in enumerate(sets) for b in sets[:number])


def of_job(groups: Sequence[Group], jobs: int) -> list[tuple[int, ...]]:
    """Per job, the numbers of its groups."""
    found: list[list[int]] = [[] for _ in range(jobs)]
    for number, group in enumerate(groups):
        for j in group.members:
            found[j].append(number)
    return [tuple(numbers) for numbers in found]
