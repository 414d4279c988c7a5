"""Keep jobs from rented nodes that they must not be on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from polluxd.model import Node, Plan, Snapshot, SnapshotJob
from polluxd.policy.cloud.prices import is_rented
from polluxd.policy.domains import eligible, partitions_of


def without_barred(snapshot: Snapshot, barred: Collection[int]) -> Snapshot:
    """Return the snapshot in which these jobs may use no rented node."""
    # The policy separates partitions by commas.
    known = {job.partition: partitions_of(job) for job in snapshot.jobs}
    renamed = {
        job.partition: f"{job.partition} (no rented node)".replace(",", "+")
        for job in snapshot.jobs
        if job.job_id in barred
    }
    everybody = frozenset({"rented"}).union(*known.values())

    def open_to(node: Node) -> frozenset[str]:
        if is_rented(node, snapshot.settings):
            return node.partitions or everybody  # none: it would be open to all
        if not node.partitions:
            return node.partitions
        return node.partitions | {name for part, name in renamed.items() if eligible(known[part], node)}

    return replace(
        snapshot,
        nodes=tuple(replace(n, partitions=open_to(n)) for n in snapshot.nodes),
        jobs=tuple(
            replace(job, partition=renamed[job.partition]) if job.job_id in barred else job
            for job in snapshot.jobs
        ),
    )


def without_gain(barred: Snapshot, free: Snapshot, plan: Plan) -> Snapshot:
    """Return the snapshot in which no barred job gains the nodes of others by being barred.

    Else the plan would give a barred job the own nodes, and move others to rented ones, for which their accounts pay.
    A barred job gets what it has of the nodes that it may use, what `plan` gives it of them, or what is idle there.

    Args:
        barred: with the jobs as `without_barred` returns them.
        free: the same as if nobody were barred.
        plan: what would be done then.
    """
    before = {job.job_id: job for job in free.jobs}
    used = Counter[str]()
    for allocation in plan.allocations:
        used.update(dict.fromkeys(allocation.placement.nodes, allocation.placement.gpus_per_node))
    return replace(
        barred,
        jobs=tuple(
            job if job.partition == before[job.job_id].partition else _bounded(job, barred, plan, used)
            for job in barred.jobs
        ),
    )


def _bounded(job: SnapshotJob, barred: Snapshot, plan: Plan, used: Mapping[str, int]) -> SnapshotJob:
    """Bound a barred job's GPUs."""
    partitions = partitions_of(job)
    open_to = {node.name: node for node in barred.nodes if eligible(partitions, node)}
    allocation = plan.of(job.job_id)
    places = [job.placement, *([allocation.placement] if allocation is not None else [])]
    most = max(place.gpus_per_node * len(open_to.keys() & set(place.nodes)) for place in places)
    most = max(most, max((node.capacity - used[name] for name, node in open_to.items()), default=0))
    if job.placement:
        most = max(most, job.spec.min_gpus)  # it moves off the nodes that are closed to it, or stays
    if most < max(job.spec.min_gpus, 1):
        why = "it must not use rented nodes now, and gains none of the own nodes by that: they are in use"
        return replace(job, pinned=True, pin_reason=why)
    if job.spec.max_gpus is not None and job.spec.max_gpus <= most:
        return job
    rule = "what it would have of the own nodes if it could use rented ones, too,"
    return replace(job, spec=replace(job.spec, max_gpus=most), max_gpus_rule=rule)
