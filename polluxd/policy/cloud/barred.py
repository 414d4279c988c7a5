"""Keep jobs from rented nodes that they must not be on."""

from __future__ import annotations

from dataclasses import replace

from polluxd.model import Node, Snapshot
from polluxd.policy.cloud.prices import price_of, spenders


def without_barred(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which no job may use a node that it must not be on.

    That is any rented node where the account's budget is used up, and a spot node where the job cannot move or has a
    fixed size.
    """
    settings, spent_up = snapshot.settings, spenders(snapshot)
    kinds = {n.name: price_of(n, settings)[0] for n in snapshot.nodes}
    barred: dict[int, str] = {}
    for job in snapshot.jobs:
        if job.account in spent_up:
            barred[job.job_id] = "no rented node"
        elif settings.cloud_interruptions and (
            not job.spec.preemptible or job.spec.min_gpus == job.spec.max_gpus
        ):
            barred[job.job_id] = "no spot node"
    if not barred:
        return snapshot
    # The policy separates partitions by commas.
    renamed = {
        (job.partition, barred[job.job_id]): f"{job.partition} ({barred[job.job_id]})".replace(",", "+")
        for job in snapshot.jobs
        if job.job_id in barred
    }

    def open_to(node: Node) -> frozenset[str]:
        kind = kinds[node.name]
        closed = {
            "no rented node": bool(kind),
            "no spot node": kind in settings.cloud_interruptions,
        }
        return node.partitions | {
            name
            for (partition, why), name in renamed.items()
            if not closed[why] and not node.partitions.isdisjoint(partition.split(","))
        }

    return replace(
        snapshot,
        nodes=tuple(replace(n, partitions=open_to(n)) for n in snapshot.nodes),
        jobs=tuple(
            replace(job, partition=renamed[job.partition, barred[job.job_id]])
            if job.job_id in barred
            else job
            for job in snapshot.jobs
        ),
    )
