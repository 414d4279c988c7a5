"""Decide about nodes that Slurm has powered down.

Slurm boots such a node for a job that is placed there. A boot takes minutes, and a cloud node costs money. Nodes with a
price are `renting`'s. Of the others that are powered down, no job grows onto one, and none moves there. A job that all
other nodes leave without GPUs may start there on its least size, as it would in Slurm without polluxd.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from polluxd.config.settings import PolicySettings
from polluxd.model import Allocation, Node, Plan, Snapshot, SnapshotJob
from polluxd.policy import decision
from polluxd.policy.cloud import renting
from polluxd.policy.cloud.prices import is_rented
from polluxd.policy.listing import Cache

_NO_ROOM = frozenset({"contention", "fragmentation"})
"""Limits (`Explanation.limit`) of a job for which the awake nodes have no room."""


def decide(snapshot: Snapshot, *, cache: Cache | None = None, explained: bool = True) -> Plan:
    """Return the plan of `decision.decide` on the awake and the rented nodes, and starts on others that are off.

    The plan's objective and bound are those of the nodes in use. Without explanations nothing starts on a node that is
    powered down and has no price.
    """
    off = _off(snapshot)
    if any(is_rented(node, snapshot.settings) for node in snapshot.nodes):
        plan = rented(snapshot, cache).plan
    else:
        plan = decision.decide(_without(snapshot, off), cache=cache, explained=explained)
    left = _without_room(snapshot, plan) if off else []
    if not left:
        return plan
    starts = {
        a.job_id: _booting(a)
        for a in decision.decide(_asleep(snapshot, off, plan, left)).allocations
        if a.placement
    }
    return replace(plan, allocations=tuple(starts.get(a.job_id, a) for a in plan.allocations))


def rented(snapshot: Snapshot, cache: Cache | None = None) -> renting.Rental:
    """Choose the rented nodes that jobs may use beside the awake ones."""
    return renting.choose(
        _without(snapshot, _off(snapshot)), lambda tried: decision.decide(tried, cache=cache)
    )


def _off(snapshot: Snapshot) -> list[Node]:
    """Return the nodes that are powered down and have no price."""
    return [n for n in snapshot.nodes if n.power == "off" and not is_rented(n, snapshot.settings)]


def _without(snapshot: Snapshot, off: Sequence[Node]) -> Snapshot:
    names = {node.name for node in off}
    closed = (replace(node, schedulable=False) if node.name in names else node for node in snapshot.nodes)
    return replace(snapshot, nodes=tuple(closed)) if names else snapshot


def _booting(allocation: Allocation) -> Allocation:
    return replace(allocation, reason=f"{allocation.reason}; Slurm boots the nodes for it")


def _without_room(snapshot: Snapshot, plan: Plan) -> list[SnapshotJob]:
    """Return the waiting jobs that nothing but the lack of room keeps waiting."""
    planned = {a.job_id: a for a in plan.allocations}
    return [
        job
        for job in snapshot.jobs
        if not job.placement and not job.pinned and job.job_id in planned and _lacks_room(planned[job.job_id])
    ]


def _lacks_room(allocation: Allocation) -> bool:
    if allocation.placement:
        return False
    if allocation.explanation is None:
        return allocation.reason.startswith("waits:")
    return allocation.explanation.limit in _NO_ROOM


def _asleep(snapshot: Snapshot, off: Sequence[Node], plan: Plan, left: list[SnapshotJob]) -> Snapshot:
    """Return a snapshot of the nodes `off`, and of the jobs that have no room elsewhere.

    Each job has its least size. Ceilings and Slurm's limits have what the plan leaves of them.
    """
    given = {a.job_id: a.placement.gpus for a in plan.allocations}
    return replace(
        snapshot,
        nodes=tuple(off),
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
