"""What a site's partitions, QOSes and slurm.conf (`configuration`: `scontrol show config`) make of jobs. Pure.

**CPUs and memory with each GPU.** DefCpuPerGPU and DefMemPerGPU of a partition, else of slurm.conf, hold for a job that
asks for none itself. Slurm leaves the CPUs out once a job's CPUs are written, and polluxd writes them at each start.
Slurm shows the memory of running jobs alone: a waiting job counts there with all memory of its nodes (22.05).

**Whole nodes.** Where memory is a resource of its own (SelectTypeParameters with _Memory), it bounds the jobs on a
node. A job that asks for none, where the site has no default, gets all memory of its nodes. With DefMemPerGPU, Slurm
shows this of every waiting job: the submission hook notes which jobs ask for memory. A partition with
OverSubscribe=EXCLUSIVE gives a job all of its nodes.

**Least sizes.** MinNodes of a partition and MinTRES of a QOS keep smaller jobs out. polluxd chooses the size, so the
least size becomes the least number of GPUs of each job there.

**Restarts.** slurmd remembers the credential of an attempt for `cred_expire` seconds after the attempt's end. On such a
node Slurm 22.05 takes a new start for a further step of the attempt before: it runs no Prolog, and makes no container.
The script then runs without what the Prolog makes, or cannot start at all. Slurm itself therefore delays each requeued
job by `cred_expire` and a second; an update of its StartTime takes this delay away.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import ceil
from types import MappingProxyType

from polluxd.model import JobState, Node
from polluxd.slurm.limits import Limits
from polluxd.slurm.node_records import with_all_gpus
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.rules import Partition, gpu_default

_EVERYWHERE = re.compile(r"^JobDefaults\s*=\s*(\S+)", re.MULTILINE)
_CONSUMED = re.compile(r"^SelectTypeParameters\s*=.*MEMORY", re.MULTILINE | re.IGNORECASE)
_WHOLE = "whole-nodes"
_SETTING = re.compile(
    r"^(SLURM_VERSION|AuthInfo|Prolog(?:Flags|\[0\])?|JobContainerType)\s*=\s*(\S+)", re.MULTILINE
)
_FIRST_MENDED = (24, 11)
"""Here no start missed its Prolog in 14 starts under load; on 22.05 7 of 17 did."""
_DEFAULT_EXPIRE_S = 120.0
"""slurm.conf(5), AuthInfo."""
_NONE = ("(null)", "none", "job_container/none")


def with_site_defaults(
    jobs: Iterable[SlurmJob],
    nodes: Iterable[Node],
    partitions: Mapping[str, Partition],
    limits: Limits,
    configuration: str,
) -> tuple[SlurmJob, ...]:
    """Return the jobs as Slurm will treat them on this site."""
    jobs = alone_on_nodes(jobs, nodes, partitions, default_memory(partitions, configuration))
    jobs = with_default_cpus(jobs, partitions, configuration)
    return with_least_sizes(jobs, nodes, partitions, limits)


def with_default_cpus(
    jobs: Iterable[SlurmJob], partitions: Mapping[str, Partition], configuration: str
) -> tuple[SlurmJob, ...]:
    """Give our jobs that ask for no CPUs the site's, if these are more."""
    everywhere = _everywhere("DefCpuPerGPU", configuration)

    def given(job: SlurmJob) -> SlurmJob:
        spec = job.spec
        if spec is None or job.demands.cpus_asked:
            return job
        ruled = [partitions[name].cpus_per_gpu for name in job.partition.split(",") if name in partitions]
        cpus = max((own or everywhere or 1 for own in ruled), default=everywhere or 1)
        return replace(job, spec=replace(spec, cpus_per_gpu=cpus)) if cpus > spec.cpus_per_gpu else job

    return tuple(map(given, jobs))


def default_memory(partitions: Mapping[str, Partition], configuration: str) -> dict[str, int]:
    """Return the memory that goes with each GPU [MB], by partition; 0: no default."""
    everywhere = _everywhere("DefMemPerGPU", configuration)
    return {
        name: (everywhere if partition.memory_per_gpu_mb is None else partition.memory_per_gpu_mb) or 0
        for name, partition in partitions.items()
    }


def _everywhere(name: str, configuration: str) -> int | None:
    found = _EVERYWHERE.search(configuration)
    return gpu_default(name, found[1]) if found else None


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
    """Have a job with all memory of its nodes be alone there; `sizes`: memory [MB] and GPUs of the nodes."""
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


def with_least_sizes(
    jobs: Iterable[SlurmJob], nodes: Iterable[Node], partitions: Mapping[str, Partition], limits: Limits
) -> tuple[SlurmJob, ...]:
    """Raise `min_gpus` of our jobs to what Slurm starts.

    A job that holds less stays as it is, and so does a job whose `max_gpus` is below: Slurm refuses to start it.
    """
    least = LeastSizes(nodes, partitions, limits)

    def raised(job: SlurmJob) -> SlurmJob:
        spec, held = job.spec, sum(job.gpus_per_node_held.values())
        if spec is None or job.companion is not None or (most := least.of(job)) <= spec.min_gpus:
            return job
        if (spec.max_gpus is not None and spec.max_gpus < most) or 0 < held < most:
            return job
        return replace(job, spec=replace(spec, min_gpus=most))

    return tuple(map(raised, jobs))


class LeastSizes:
    """GPUs that jobs need at least to start in one of their partitions."""

    def __init__(self, nodes: Iterable[Node], partitions: Mapping[str, Partition], limits: Limits) -> None:
        self._nodes = {node.name: node for node in nodes if node.gpus > 0}
        self._partitions, self._qos = partitions, limits.qos
        self._known: dict[tuple[str, str, int], int] = {}

    def of(self, job: SlurmJob) -> int:
        key = job.partition, job.qos, job.spec.cpus_per_gpu if job.spec else 1
        if key not in self._known:
            names = (name for name in job.partition.split(",") if name in self._partitions)
            found = (max(self._sizes(self._partitions[name], job.qos, key[2])) for name in names)
            self._known[key] = min(found, default=1)
        return self._known[key]

    def _sizes(self, rule: Partition, qos: str, cpus_per_gpu: int) -> Iterator[int]:
        reach = [self._nodes[name] for name in rule.nodes if name in self._nodes]
        largest, kinds = max((node.gpus for node in reach), default=0), {node.gpu_type for node in reach}
        yield _beyond(rule.min_nodes, largest)
        for name in {rule.qos, qos} & self._qos.keys():
            for tres, least in self._qos[name].job.least.items():
                yield _in_gpus(tres, least, cpus_per_gpu, kinds, largest)


def _in_gpus(tres: str, least: int, cpus_per_gpu: int, kinds: set[str], largest: int) -> int:
    """Return a demand on TRES as a number of GPUs; 1 for other TRES, which are left to Slurm's refusal."""
    if tres == "gres/gpu" or (tres.startswith("gres/gpu:") and kinds == {tres.removeprefix("gres/gpu:")}):
        return least
    if tres == "cpu":
        return ceil(least / max(cpus_per_gpu, 1))
    return _beyond(least, largest) if tres == "node" else 1


def _beyond(nodes: int, largest: int) -> int:
    """The fewest GPUs that no smaller number of nodes has."""
    return (nodes - 1) * largest + 1


def kept_off_s(configuration: str) -> float:
    """Return for how many seconds after its end an attempt bars its nodes to the next one; 0: not at all.

    Args:
        configuration: `scontrol show config`.
    """
    return _expire_s(configuration) + 1.0 if protections(configuration) else 0.0


def protections(configuration: str) -> list[str]:
    """Return the settings that a start misses while the credential of the attempt before stands."""
    settings = dict(_SETTING.findall(configuration))
    numbers = re.match(r"(\d+)\.(\d+)", settings.get("SLURM_VERSION", ""))
    if numbers is None or (int(numbers[1]), int(numbers[2])) >= _FIRST_MENDED:
        return []
    # Without PrologFlags, too, slurmd runs a Prolog for the first start that it knows of alone.
    return [
        f"{name}={value}"
        for name, value in sorted(settings.items())
        if name not in ("SLURM_VERSION", "AuthInfo") and value not in _NONE
    ]


def _expire_s(configuration: str) -> float:
    found = re.search(r"cred_expire=(\d+)", dict(_SETTING.findall(configuration)).get("AuthInfo", ""))
    return float(found[1]) if found else _DEFAULT_EXPIRE_S
