"""Weights, limits and shares of jobs, users and accounts. A search weighs as one job.

A ceiling is the most GPUs that the jobs of an account or a user may hold together. A guarantee is the number of GPUs
that they must be able to hold. With fairness per user or account, each owner is guaranteed an equal share as far as the
owner's jobs can use it, and the jobs divide the owner's weight. Weights alone do not give equal shares: under the
objective of completion times a larger weight means to run first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import GpuLimit, Plan, Snapshot, SnapshotJob
from polluxd.policy.domains import Domain

Floats = NDArray[np.float64]

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


_OWNER: Mapping[str, Callable[[SnapshotJob], str]] = {
    "user": attrgetter("user"),
    "account": attrgetter("account"),
}


_RANK = 0.5
"""Of a trial that has claimed none."""
_LEAST_RANK = 0.1
_SIZE = 2
"""Of the trials that have the weight, in multiples of their least size. In three simulated searches (TPE, ASHA) that
had no part in the choice of 2, the target came a fifth sooner than with 1. The whole search ends about a fifth later.
1 while no trial claims a rank: all begin."""
_BEYOND = 1e-3
"""Part of a search's weight that the trials beyond its share divide."""


def divided(snapshot: Snapshot) -> Snapshot:
    """Divide the weight of each user or account over the owner's jobs, that of a search over its trials.

    `settings.fairness_per` names the owner. All jobs of the snapshot count, in every partition, running or pending; a
    search counts as one. With fairness per job and without searches the snapshot stays as it is.
    """
    owner = _OWNER.get(snapshot.settings.fairness_per)
    trials = Counter(map(_unit, snapshot.jobs))
    if owner is None and len(trials) == len(snapshot.jobs):
        return snapshot
    jobs = [replace(job, weight=job.weight / trials[_unit(job)]) for job in snapshot.jobs]
    if owner is not None:
        units = Counter(name for name, _ in {(owner(job), _unit(job)) for job in jobs})
        jobs = [replace(job, weight=job.weight / units[owner(job)]) for job in jobs]
    return replace(snapshot, jobs=tuple(jobs))


def _unit(job: SnapshotJob) -> tuple[str, str]:
    """Return what weighs as one: the search of a user, or the job."""
    return (job.user, job.spec.search) if job.spec.search else ("", str(job.job_id))


def ranked(domain: Domain, settings: PolicySettings) -> Domain:
    """Give a search's weight to as many of its trials as its share has room for at `_SIZE`, by their claimed ranks.

    Divided over all trials, a search would weigh less than one job: its trials would each be too light for one GPU.
    Each search keeps its sum, so a claim moves weight between trials of this search only.
    """
    searches: dict[tuple[str, str], list[int]] = {}
    for j, job in enumerate(domain.jobs):
        if job.spec.search:
            searches.setdefault(_unit(job), []).append(j)
    if not searches:
        return domain
    jobs, own = list(domain.jobs), weights(domain.jobs, settings)
    for members in searches.values():
        members.sort(key=lambda j: (-_rank(jobs[j]), not jobs[j].started, jobs[j].job_id))
        share = domain.capacity * float(own[members].sum() / own.sum())
        rank = np.array([_rank(jobs[j]) for j in members])
        # A trial that is too light for its least size would get it all the same, or none would run.
        size = _SIZE if any(_claim(jobs[j]) is not None for j in members) else 1
        least = size * jobs[members[0]].spec.min_gpus
        room = max(int((share * rank / np.cumsum(rank) + 1e-9 >= least).sum()), 1)
        part = np.where(np.arange(rank.size) < room, rank / rank[:room].sum(), _BEYOND / rank.size)
        part *= sum(jobs[j].weight for j in members) / part.sum()
        for j, weight in zip(members, part.tolist(), strict=True):
            jobs[j] = replace(jobs[j], weight=weight)
    return replace(domain, jobs=tuple(jobs))


def _claim(job: SnapshotJob) -> float | None:
    return None if job.report is None else job.report.search_rank


def _rank(job: SnapshotJob) -> float:
    claimed = _claim(job)
    return max(_RANK if claimed is None else claimed, _LEAST_RANK)


def with_shares(jobs: Sequence[SnapshotJob], settings: PolicySettings, capacity: int) -> PolicySettings:
    """Guarantee each user or account its share of `capacity` GPUs.

    Guarantees of the settings stay. The other owners share the other GPUs by the sums of their jobs' weights. With
    fairness per job the settings stay as they are.
    """
    owner = _OWNER.get(settings.fairness_per)
    if owner is None:
        return settings
    of_users = settings.fairness_per == "user"
    explicit = settings.user_guarantees if of_users else settings.account_guarantees
    weight: dict[str, float] = {}
    for job, own in zip(jobs, weights(jobs, settings).tolist(), strict=True):
        weight[owner(job)] = weight.get(owner(job), 0.0) + own
    others = {name: own for name, own in weight.items() if name not in explicit}
    left = max(capacity - sum(explicit[name] for name in weight.keys() - others.keys()), 0)
    total = sum(others.values())
    shares = {name: int(left * own / total + 1e-9) for name, own in others.items()} | dict(explicit)
    return (
        replace(settings, user_guarantees=shares)
        if of_users
        else replace(settings, account_guarantees=shares)
    )


def beyond_share(snapshot: Snapshot, plan: Plan, waiting: Collection[int]) -> frozenset[int]:
    """Return the waiting jobs that would take their owner beyond its share.

    A job counts with its min-gpus, after what the plan gives to the owner, in order of submission. Empty with fairness
    per job.
    """
    owner = _OWNER.get(snapshot.settings.fairness_per)
    if owner is None:
        return frozenset()
    shares = with_shares(snapshot.jobs, snapshot.settings, sum(node.capacity for node in snapshot.nodes))
    of_users = snapshot.settings.fairness_per == "user"
    left = Counter(shares.user_guarantees if of_users else shares.account_guarantees)
    held = {a.job_id: a.placement.gpus for a in plan.allocations}
    for job in snapshot.jobs:
        left[owner(job)] -= held.get(job.job_id, 0)
    beyond = set()
    for job in sorted(snapshot.jobs, key=lambda job: (job.submitted_at, job.job_id)):
        if job.job_id in waiting:
            if job.spec.min_gpus > left[owner(job)]:
                beyond.add(job.job_id)
            else:
                left[owner(job)] -= job.spec.min_gpus
    return frozenset(beyond)


def within_owner(weight: Floats, factor: Floats, jobs: Sequence[SnapshotJob], fairness_per: str) -> Floats:
    """Multiply weights [J] by factors [J].

    With fairness per user or account, the factors only move weight between the jobs of one owner: a user whose jobs all
    wait gains nothing. A search has the least factor of its trials: while one of them runs, it
    does not wait.
    """
    if any(job.spec.search for job in jobs):
        least: dict[tuple[str, str], float] = {}
        for job, own in zip(jobs, factor.tolist(), strict=True):
            least[_unit(job)] = min(own, least.get(_unit(job), own))
        factor = np.array([least[_unit(job)] for job in jobs])
    found = weight * factor
    owner = _OWNER.get(fairness_per)
    if owner is None or not jobs:
        return found
    _, number = np.unique([owner(job) for job in jobs], return_inverse=True)
    before, after = np.bincount(number, weights=weight), np.bincount(number, weights=found)
    return np.asarray(found * (before / after)[number])


def weights(jobs: Sequence[SnapshotJob], settings: PolicySettings) -> Floats:
    """Return each job's weight [J].

    It is the product of the weights of job, account, user and QOS; each is 1 unless set.
    """
    value = np.array([job.weight for job in jobs], dtype=np.float64)
    if settings.account_weights:
        value *= [settings.account_weights.get(job.account, 1.0) for job in jobs]
    if settings.user_weights:
        value *= [settings.user_weights.get(job.user, 1.0) for job in jobs]
    if settings.qos_weights or settings.job_weights:
        value *= [
            settings.qos_weights.get(job.qos, 1.0) * settings.job_weights.get(str(job.job_id), 1.0)
            for job in jobs
        ]
    # A weight of nothing would divide by zero: such a job comes after all others, but is not forgotten.
    return np.where(np.isfinite(value), np.clip(value, 1e-6, 1e6), 1.0)


def mean_weight(snapshot: Snapshot) -> float:
    """Return the average weight of the snapshot's jobs; 1 without jobs.

    Weights are relative to it.
    """
    found = weights(sorted(snapshot.jobs, key=attrgetter("job_id")), snapshot.settings).tolist()
    return sum(found) / len(found) if found else 1.0
