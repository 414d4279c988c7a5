"""The least sizes at which Slurm starts jobs. Pure.

MinNodes of a partition and MinTRES of a QOS keep smaller jobs out. polluxd chooses the size, so the least size becomes
the least number of GPUs of each job there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil

from polluxd.model import Node
from polluxd.slurm.limits import Limits
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition


def with_least_sizes(
    jobs: Iterable[SlurmJob], nodes: Iterable[Node], partitions: Mapping[str, Partition], limits: Limits
) -> tuple[SlurmJob, ...]:
    """Raise `min_gpus` of our jobs to what Slurm starts.

    A job that holds less stays as it is, and so does a job whose `max_gpus` is below: Slurm refuses to start it.
    """
    with_gpus = {node.name: node for node in nodes if node.gpus > 0}
    known: dict[tuple[str, str, int], int] = {}

    def least(job: SlurmJob) -> int:
        assert job.spec is not None
        key = job.partition, job.qos, job.spec.cpus_per_gpu
        if key not in known:
            known[key] = _least(*key, with_gpus, partitions, limits)
        return known[key]

    def raised(job: SlurmJob) -> SlurmJob:
        spec, held = job.spec, sum(job.gpus_per_node_held.values())
        if spec is None or job.companion is not None or (most := least(job)) <= spec.min_gpus:
            return job
        if (spec.max_gpus is not None and spec.max_gpus < most) or 0 < held < most:
            return job
        return replace(job, spec=replace(spec, min_gpus=most))

    return tuple(map(raised, jobs))


def _least(
    partition: str,
    qos: str,
    cpus_per_gpu: int,
    nodes: Mapping[str, Node],
    partitions: Mapping[str, Partition],
    limits: Limits,
) -> int:
    """GPUs that a job needs at least to start in one of its partitions."""
    ruled = [partitions[name] for name in partition.split(",") if name in partitions]
    if not ruled:
        return 1
    found = []
    for rule in ruled:
        reach = [nodes[name] for name in rule.nodes if name in nodes]
        largest = max((node.gpus for node in reach), default=0)
        sizes = [_beyond(rule.min_nodes, largest)]
        for name in dict.fromkeys(filter(None, (rule.qos, qos))):
            demanded = limits.qos[name].job.least if name in limits.qos else {}
            kinds = {node.gpu_type for node in reach}
            sizes += [_in_gpus(*one, cpus_per_gpu, kinds, largest) for one in demanded.items()]
        found.append(max(sizes))
    return min(found)


def _in_gpus(tres: str, least: int, cpus_per_gpu: int, kinds: set[str], largest: int) -> int:
    """Return a demand on TRES as a number of GPUs.

    1: it is on other TRES, and left to Slurm's refusal.
    """
    if tres == "gres/gpu" or (tres.startswith("gres/gpu:") and kinds == {tres.removeprefix("gres/gpu:")}):
        return least
    if tres == "cpu":
        return ceil(least / max(cpus_per_gpu, 1))
    return _beyond(least, largest) if tres == "node" else 1


def _beyond(nodes: int, largest: int) -> int:
    """The fewest GPUs that no smaller number of nodes has."""
    return (nodes - 1) * largest + 1
