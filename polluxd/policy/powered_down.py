"""Decide about nodes that Slurm has powered down.

Slurm boots such a node for a job that is placed there. A boot takes minutes, and a cloud node costs money. So no job
grows onto a node that is powered down, and none moves there. A job that the awake nodes leave without GPUs may start
there on its least size, as it would in Slurm without polluxd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polluxd.config.settings import PolicySettings
from polluxd.model import Allocation, Plan, Snapshot, SnapshotJob
from polluxd.policy import decision
from polluxd.policy.cache import Cache

_NO_ROOM = frozenset({"contention", "fragmentation"})
"""Limits (`Explanation.limit`) of a job for which the awake nodes have no room."""


def decide(snapshot: Snapshot, *, cache: Cache | None = None, explained: bool = True) -> Plan:
    """Return the plan of `decision.decide` on the awake nodes, and starts on nodes that are powered down.

    The plan's objective and bound are those of the awake nodes. Without explanations nothing starts on a node that is
    powered down.
    """
    if not any(node.power == "off" for node in snapshot.nodes):
        return decision.decide(snapshot, cache=cache, explained=explained)
    awake = tuple(
        replace(node, schedulable=False) if node.power == "off" else node for node in snapshot.nodes
    )
    plan = decision.decide(replace(snapshot, nodes=awake), cache=cache, explained=explained)
    left = _without_room(snapshot, plan)
    if not left:
        return plan
    starts = {
        a.job_id: _booting(a)
        for a in decision.decide(_asleep(snapshot, plan, left)).allocations
        if a.placement
    }
    return replace(plan, allocations=tuple(starts.get(a.job_id, a) for a in plan.allocations))


def _booting(allocation: Allocation) -> Allocation:
    return replace(allocation, reason=f"{allocation.reason}; Slurm boots the nodes for it")


def _without_room(snapshot: Snapshot, plan: Plan) -> list[SnapshotJob]:
    """Return the waiting jobs that nothing but the lack of room keeps waiting."""
    told = {a.job_id: a for a in plan.allocations}
    return [
        job
        for job in snapshot.jobs
        if not job.placement and not job.pinned and job.job_id in told and _lacks_room(told[job.job_id])
    ]


def _lacks_room(allocation: Allocation) -> bool:
    if allocation.placement:
        return False
    if allocation.explanation is None:
        return allocation.reason.startswith("waits:")
    return allocation.explanation.limit in _NO_ROOM


def _asleep(snapshot: Snapshot, plan: Plan, left: list[SnapshotJob]) -> Snapshot:
    """Return a snapshot of the nodes that are powered down, and of the jobs that have no room elsewhere.

    Each job has its least size. Ceilings and Slurm's limits have what the plan leaves of them.
    """
    given = {a.job_id: a.placement.gpus for a in plan.allocations}
    return replace(
        snapshot,
        nodes=tuple(node for node in snapshot.nodes if node.power == "off"),
        jobs=tuple(map(_least, left)),
        settings=_what_is_left(snapshot, given),
        limits=tuple(
            replace(limit, gpus=limit.gpus - sum(given.get(job_id, 0) for job_id in limit.jobs))
            for limit in snapshot.limits
        ),
    )


def _least(job: SnapshotJob) -> SnapshotJob:
    if job.spec.gpu_counts != "any":
        return job
    return replace(job, spec=replace(job.spec, max_gpus=job.spec.min_gpus))


def _what_is_left(snapshot: Snapshot, given: Mapping[int, int]) -> PolicySettings:
    settings = snapshot.settings
    users, accounts = dict(settings.user_ceilings), dict(settings.account_ceilings)
    for job in snapshot.jobs:
        for ceilings, name in ((users, job.user), (accounts, job.account)):
            if name in ceilings:
                ceilings[name] = max(ceilings[name] - given.get(job.job_id, 0), 0)
    return replace(
        settings,
        start_gpus=1,
        user_ceilings=users,
        account_ceilings=accounts,
        user_guarantees={},
        account_guarantees={},
    )
