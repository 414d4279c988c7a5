"""Say what a job would get with one more node. Pure.

The answer is a second decision on the same snapshot.
"""

from __future__ import annotations

from dataclasses import replace

from polluxd.model import Allocation, Node, Snapshot
from polluxd.policy.cloud.powered_down import decide
from polluxd.policy.domains import eligible, partitions_of

ADDED = "~one-more"
"""Name of the node that is added; no node of Slurm can be called that."""


def one_node_more(snapshot: Snapshot, job_id: int) -> Allocation | None:
    """Decide with one node more; return what the job would get.

    The added node is a copy of one that the job could use. Returns None where the job is not in the snapshot, or
    where no node with GPUs is open to it.
    """
    job = next((job for job in snapshot.jobs if job.job_id == job_id), None)
    if job is None:
        return None
    held = set(job.placement.nodes)
    open_to = [n for n in snapshot.nodes if n.gpus > 0 and eligible(partitions_of(job), n)]
    # A node of the kind that the job holds, else the first by name.
    model = min(open_to, key=lambda n: (n.name not in held, n.name), default=None)
    if model is None:
        return None
    return decide(replace(snapshot, nodes=(*snapshot.nodes, _copy(model)))).of(job_id)


def _copy(node: Node) -> Node:
    return replace(node, name=ADDED, foreign_gpus=0, foreign_cpus=0, schedulable=True, power="on")
