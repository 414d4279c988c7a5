"""Fairness per user or account: an equal share of the GPUs for each owner. A search weighs as one job.

Each owner is guaranteed the share as far as the owner's jobs can use it, and the jobs divide the owner's weight.
Weights alone do not give equal shares: under the objective of completion times a larger weight means to run first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from polluxd.config.settings import PolicySettings
from polluxd.model import Plan, Snapshot, SnapshotJob
from polluxd.policy.domains import Domain
from polluxd.policy.fairness import weights

Floats = NDArray[np.float64]

_OWNER: Mapping[str, Callable[[SnapshotJob], str]] = {
    "user": attrgetter("user"),
    "account": attrgetter("account"),
}


_RANK = 0.5
"""Of a trial that has claimed none."""
_LEAST_RANK = 0.1
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
    """Give a search's weight to as many of its trials as its share has room for, by their claimed ranks.

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
        room = max(int((share * rank / np.cumsum(rank) + 1e-9 >= jobs[members[0]].spec.min_gpus).sum()), 1)
        part = np.where(np.arange(rank.size) < room, rank / rank[:room].sum(), _BEYOND / rank.size)
        part *= sum(jobs[j].weight for j in members) / part.sum()
        for j, weight in zip(members, part.tolist(), strict=True):
            jobs[j] = replace(jobs[j], weight=weight)
    return replace(domain, jobs=tuple(jobs))


def _rank(job: SnapshotJob) -> float:
    claimed = None if job.report is None else job.report.search_rank
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

    With fairness per user or account, the factors only move weight between the jobs of one owner: a user who claims
    that all jobs are nearly done gains nothing. A search has the least factor of its trials: while one of them runs, it
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
