"""What a refusal of Slurm is about, read from its reason and its records. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from polluxd.apply.startable import time_left
from polluxd.model import JobState, Placement
from polluxd.slurm.protocol import ClusterState, SlurmJob

_OF_ONE_JOB = re.compile(r"Per(Job|Node)|Partition|Wall|Licenses|Invalid|NotAllowed")
_UNITS = (
    (r"PerNode", "per node"),
    (r"C(PU|pu)", "cpu"),
    (r"Mem", "mem"),
    (r"Node(Limit|Per|Minutes|RunMinutes)", "node"),
)
_LONGEST_MIN = 1e7
_HOLDS = (JobState.RUNNING, JobState.SUSPENDED)
"""States that Slurm's limits count: a job that is COMPLETING has left them, and keeps its licences."""


class Counted(NamedTuple):
    """What a limit counts, and the jobs that share it."""

    shared: tuple[tuple[str, str], ...]
    """Fields that all jobs under the limit have in common, with their values."""
    unit: str
    """`gres/gpu`, `cpu`, `mem`, `node`, `per node` (GPUs of each node), or `jobs`."""
    minutes: bool
    """Times the time limit."""
    alone: bool
    """For each job by itself."""


def counted(job: SlurmJob, reason: str) -> Counted:
    """Read from squeue(1)'s reason what a limit counts, and the jobs that share it."""
    shared: tuple[tuple[str, str], ...]
    if reason.startswith("Licenses"):
        shared = (("licenses", ",".join(sorted(job.licenses))),)
    elif reason.startswith("JobArrayTaskLimit") and job.array is not None:
        shared = (("array", str(job.array[0])),)
    elif re.match(r"InvalidQOS|QOSNotAllowed", reason):
        # It was taken from the association of the user, or the partition admits it no more: no size starts.
        shared = (
            ("qos", job.qos),
            ("account", job.account),
            ("user", job.user),
            ("partition", job.partition),
        )
    elif reason.startswith("Partition"):
        shared = (("partition", job.partition),)
    elif re.match("Assoc|InvalidAccount|AccountNotAllowed", reason) or "PerAccount" in reason:
        # It may be the user's own association, or the account's.
        shared = (("account", job.account), ("user", job.user))
    else:
        # It may be the QOS of the job, or that of the partition.
        shared = (("qos", job.qos), ("partition", job.partition))
        shared = (*shared, ("user", job.user)) if "PerUser" in reason else shared
    if re.search(
        r"Jobs|Submit|Licenses|JobArray|Wall|TimeLimit|PartitionDown|PartitionInactive|Config|Invalid|NotAllowed",
        reason,
    ):
        unit = "jobs"
    else:
        unit = next((unit for words, unit in _UNITS if re.search(words, reason)), "gres/gpu")
    minutes = re.search(r"Min(ute)?s|RunMin|Wall|TimeLimit", reason) is not None
    return Counted(shared, unit, minutes, _OF_ONE_JOB.search(reason) is not None)


def shares(job: SlurmJob, key: Counted) -> bool:
    """Whether the limit counts the job."""
    has = {
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "user": job.user,
        "licenses": ",".join(sorted(job.licenses)),
        "array": str(job.array[0]) if job.array else "",
        "job": str(job.job_id),
    }
    return all(has[name] == value for name, value in key.shared)


def weight(job: SlurmJob, gpus: int, nodes: int, key: Counted, now: float) -> float:
    """What the limit counts of the job on so many GPUs, of so many nodes."""
    count = 1.0
    if key.unit == "gres/gpu":
        count = float(gpus)
    elif key.unit == "mem":
        count = float(gpus * max(job.mem_per_gpu_mb, 1))
    elif key.unit == "node":
        count = float(nodes)
    elif key.unit == "per node":
        count = gpus / max(nodes, 1)
    elif key.unit == "cpu":
        count = float(gpus * job.spec.cpus_per_gpu if job.spec else sum(job.cpus_per_node_held.values()))
    return count * min(max(time_left(job, now) / 60.0, 1.0), _LONGEST_MIN) if key.minutes else count


def held_of(job: SlurmJob, key: Counted, state: ClusterState) -> float:
    """What a limit counts of the job now."""
    if job.state not in _HOLDS and not (key.shared[0][0] == "licenses" and job.state is JobState.COMPLETING):
        return 0.0
    held = job.gpus_per_node_held
    return weight(job, sum(held.values()), len(held), key, state.taken_at)


def rules_of(state: ClusterState, job: SlurmJob) -> tuple[object, ...]:
    """What Slurm's records say of the limits and rules that the job is under."""
    limits, partitions = state.limits, tuple(state.rules.named(job.partition))
    chain, account = [], job.account
    while account and (one := limits.associations.get((account, None, ""))) is not None and one not in chain:
        chain.append(one)
        account = one.parent
    own = [limits.associations.get((job.account, job.uid, name)) for name in (job.partition, "")]
    qos = [limits.qos.get(name) for name in (job.qos, *(p.qos for p in partitions))]
    free = [(name, state.rules.licenses.get(name)) for name in sorted(job.licenses)]
    tasks = [j for j in state.jobs if job.array and j.array and j.array[0] == job.array[0]]
    return partitions, chain, own, qos, free, {j.demands.array_limit for j in tasks}


def demands_of(job: SlurmJob) -> tuple[object, ...]:
    """What a node has to have for the job, per GPU."""
    assert job.spec is not None
    return job.spec.cpus_per_gpu, job.mem_per_gpu_mb, job.partition, replace(job.demands, asked=None)


def equipment(state: ClusterState, target: Placement) -> tuple[object, ...]:
    """What these nodes have."""
    own = [node for node in state.nodes if node.name in target.nodes]
    return tuple((n.name, n.gpus, n.cpus, n.memory_mb, n.features, n.gpu_type) for n in own)


def condition(state: ClusterState, target: Placement) -> tuple[object, ...]:
    """What these nodes have and allow, whoever uses them."""
    allowed = [node.schedulable for node in state.nodes if node.name in target.nodes]
    return equipment(state, target), allowed, state.rules.reservations


def use(state: ClusterState, target: Placement, but: int) -> list[Counter[str]]:
    """What other jobs use of each of these nodes."""
    found = []
    nodes = {node.name: node for node in state.nodes}
    others = [job for job in state.jobs if job.spec is not None and job.job_id != but]
    for name in target.nodes:
        node, used = nodes.get(name), Counter[str]()
        if node is not None:
            used.update(gpus=node.foreign_gpus, cpus=node.foreign_cpus, memory=node.foreign_memory_mb)
        for job in others:
            gpus = job.gpus_per_node_held.get(name, 0)
            cpus = job.cpus_per_node_held.get(name, 0)
            used.update(gpus=gpus, cpus=cpus, memory=gpus * job.mem_per_gpu_mb)
        found.append(used)
    return found
