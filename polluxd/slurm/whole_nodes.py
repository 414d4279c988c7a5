"""Jobs that share neither memory nor nodes with others. Pure.

Where memory is a resource of its own (SelectTypeParameters with _Memory), it bounds the jobs on a node. A job that asks
for none, where the site has no default, gets all memory of its nodes. With DefMemPerGPU, Slurm shows this of every
waiting job: the submission hook notes which jobs ask for memory. A partition with OverSubscribe=EXCLUSIVE gives a
job all of its nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from polluxd.model import JobState, Node
from polluxd.slurm.node_records import with_all_gpus
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition

_CONSUMED = re.compile(r"^SelectTypeParameters\s*=.*MEMORY", re.MULTILINE | re.IGNORECASE)
_WHOLE = "whole-nodes"


def shares_memory(configuration: str) -> bool:
    """Tell from `scontrol show config` whether jobs share out memory."""
    return _CONSUMED.search(configuration) is not None


def without_memory(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return nodes whose memory bounds no job."""
    return tuple(replace(node, memory_mb=0, foreign_memory_mb=0) for node in nodes)


def alone_on_nodes(
    jobs: Iterable[SlurmJob],
    nodes: Iterable[Node],
    partitions: Mapping[str, Partition],
    default_memory: Mapping[str, int] = MappingProxyType({}),
) -> tuple[SlurmJob, ...]:
    """Have each job of ours that shares its nodes with nobody take whole ones.

    A job with all memory of its nodes, and a max-gpus below a whole node, counts with all memory at its max-gpus.

    Args:
        default_memory: memory that the site gives with each GPU [MB], by partition.
    """
    gpus = {node.name: node.gpus for node in nodes}
    memory = {node.name: (node.memory_mb, node.gpus) for node in nodes if node.memory_mb and node.gpus}
    sizes = frozenset(memory.values())
    exclusive = {name for name, partition in partitions.items() if partition.exclusive}

    def alone(job: SlurmJob) -> SlurmJob:
        if job.spec is None:
            return job
        if not exclusive.isdisjoint(job.partition.split(",")):
            demands = replace(job.demands, exclusive=True)
            spec = replace(job.spec, gpu_counts=_WHOLE)
            return with_all_gpus(replace(job, spec=spec, demands=demands), gpus)
        default = max((default_memory.get(name, 0) for name in job.partition.split(",")), default=0)
        if sizes and default and not job.demands.memory_asked:
            waits = job.state is JobState.PENDING
            return replace(job, mem_per_gpu_mb=default) if waits else job
        here = [memory[name] for name in job.nodes if name in memory] or sizes
        return _with_all_memory(job, here) if sizes else job

    return tuple(map(alone, jobs))


def _with_all_memory(job: SlurmJob, sizes: Iterable[tuple[int, int]]) -> SlurmJob:
    """Have a job with all memory of its nodes be alone there.

    Args:
        sizes: memory [MB] and GPUs of the nodes in question.
    """
    spec, gpus, each = job.spec, job.requested_gpus_per_node, job.mem_per_gpu_mb
    if spec is None or spec.mem_per_gpu_mb or not gpus or not each:
        return job
    # Slurm divided: less than a megabyte per GPU is lost.
    whole = [(mb, count) for mb, count in sizes if 0 <= mb - each * gpus < gpus < count]
    if not whole:
        return job
    mb, count = min(whole)
    if spec.max_gpus is not None and spec.max_gpus < count:
        return replace(job, mem_per_gpu_mb=mb // spec.max_gpus)
    return replace(job, mem_per_gpu_mb=mb // count, spec=replace(spec, gpu_counts=_WHOLE))
