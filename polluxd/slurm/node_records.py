"""Read `scontrol -o -d show node`, and work out who holds what.

A node record has no text of users. Administrators' texts (Comment, Extra, Reason) come last and are cut off first. A
record that makes no sense closes its node for placement and costs nothing else.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from polluxd.errors import SlurmGarbled
from polluxd.model import JobState, Node
from polluxd.slurm.notation import gpus_in_use, parse_gpus
from polluxd.slurm.protocol import SlurmJob
from polluxd.slurm.queue import Queue
from polluxd.slurm.states import power, schedulable

_NAME = re.compile(r"NodeName=([^\s,\[\]]+)\s")
_ADMINISTRATORS = re.compile(r"\s(?:Comment|Extra|Reason)=")
_FIELD = re.compile(
    r"\s(ActiveFeatures|AllocMem|CoresPerSocket|CPUAlloc|CPUEfctv|CPUTot|Gres|GresUsed|MemSpecLimit|Partitions|RealMemory|Sockets|State"
    r"|ThreadsPerCore|TmpDisk)=(\S*)"
)


@dataclass(frozen=True, slots=True)
class NodeRecords:
    """What an answer says."""

    nodes: tuple[Node, ...]
    """Each without the use that others make of it."""
    gpus_used: Mapping[str, int]
    cpus_used: Mapping[str, int]
    memory_used: Mapping[str, int]
    unreadable: Mapping[str, str]
    """Nodes whose record could not be understood: why. They are among `nodes`, closed and without GPUs."""


def parse_nodes(text: str) -> NodeRecords:
    """Read all nodes. Raises SlurmGarbled where the answer is cut off, or is no list of nodes."""
    stripped = text.strip()
    if not stripped or stripped == "No nodes in the system":
        return NodeRecords((), {}, {}, {}, {})
    if not text.endswith("\n"):
        raise SlurmGarbled(f"scontrol's answer is cut off: it ends in {text[-40:]!r}")
    nodes: list[Node] = []
    gpus: dict[str, int] = {}
    cpus: dict[str, int] = {}
    memory: dict[str, int] = {}
    unreadable: dict[str, str] = {}
    for line in filter(None, map(str.strip, text.split("\n"))):
        named = _NAME.match(line + " ")
        if named is None:
            raise SlurmGarbled(f"expected a node record (NodeName=), got {line[:80]!r}")
        name = named[1]
        try:
            node, gpus[name], cpus[name], memory[name] = _node(name, line)
        except SlurmGarbled as error:
            unreadable[f"node {name}"] = str(error)
            node = Node(name, 0, schedulable=False)
        nodes.append(node)
    return NodeRecords(tuple(nodes), gpus, cpus, memory, unreadable)


def _node(name: str, line: str) -> tuple[Node, int, int, int]:
    """The node, and its GPUs, CPUs and memory in use."""
    fields = dict(_FIELD.findall(_ADMINISTRATORS.split(line, maxsplit=1)[0]))
    for key in ("Gres", "State", "CPUTot"):
        if key not in fields:
            raise SlurmGarbled(f"its record has no {key}=")
    total = _number(fields, "CPUTot")
    gpus = parse_gpus(fields["Gres"])
    node = Node(
        name=name,
        gpus=gpus.count,
        gpu_type=gpus.type,
        schedulable=schedulable(fields["State"]),
        partitions=frozenset(p for p in fields.get("Partitions", "").split(",") if p),
        cpus=_number(fields, "CPUEfctv") if "CPUEfctv" in fields else total,
        features=frozenset(f for f in fields.get("ActiveFeatures", "(null)").split(",") if f != "(null)"),
        tmp_mb=_number(fields, "TmpDisk") if "TmpDisk" in fields else None,
        memory_mb=max(_number(fields, "RealMemory", 0) - _number(fields, "MemSpecLimit", 0), 0),
        power=power(fields["State"]),
        cpus_per_core=_cpus_per_core(fields, total),
    )
    gpus_used = gpus_in_use(fields.get("GresUsed", ""), gpus.count)
    return node, gpus_used, _number(fields, "CPUAlloc", 0), _number(fields, "AllocMem", 0)


def _cpus_per_core(fields: Mapping[str, str], total: int) -> int:
    """CPUs that Slurm gives together; 1 where its CPUs are cores."""
    cores = _number(fields, "Sockets", 1) * _number(fields, "CoresPerSocket", total)
    threads = _number(fields, "ThreadsPerCore", 1)
    return threads if threads > 1 and cores * threads == total else 1


def _number(fields: Mapping[str, str], key: str, default: int | None = None) -> int:
    value = fields.get(key)
    if value is None and default is not None:
        return default
    if value is None or not re.fullmatch(r"\d{1,9}", value):
        raise SlurmGarbled(f"expected {key} as a number, got {value!r}")
    return int(value)


def attribute(
    queue: Queue, records: NodeRecords
) -> tuple[tuple[SlurmJob, ...], tuple[Node, ...], dict[str, str]]:
    """Return jobs with their GPUs, nodes with foreign use, and unknowns.

    Foreign use is what Slurm's node records say is in use and no job of ours holds. (22.05 counts the GPUs of a job as
    free from its first signal on, while its processes may still use them: jobs that are ending count as well.)
    """
    ours, unknown = _placed(queue, records)
    gpus = {node.name: node.gpus for node in records.nodes}
    ours = tuple(with_all_gpus(job, gpus) if job.demands.exclusive else job for job in ours)
    held, cpus_held, memory_held, running = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    foreign_jobs, leaving = set[str](), Counter[str]()
    for job in ours:
        if job.spec is not None:
            held.update(job.gpus_per_node_held)
            cpus_held.update(job.cpus_per_node_held)
            if job.state is not JobState.COMPLETING:
                running.update(job.gpus_per_node_held)
                memory_held.update({n: g * job.mem_per_gpu_mb for n, g in job.gpus_per_node_held.items()})
        elif not job.state.finished:
            foreign_jobs.update(job.nodes)
            leaving.update(dict.fromkeys(job.nodes, queue.leaving.get(job.job_id, 0)))
    lost = queue.lost or len(unknown) > 0
    nodes = []
    for node in records.nodes:
        name = node.name
        foreign, foreign_cpus, foreign_memory = 0, 0, 0
        # A job of ours that started after squeue was read is no foreign one.
        if lost or name in foreign_jobs:
            in_use = max(0, records.gpus_used.get(name, 0) - running[name])
            foreign = min(in_use + leaving[name], max(0, node.gpus - held[name]))
            foreign_cpus = max(0, records.cpus_used.get(name, 0) - cpus_held[name])
            foreign_memory = max(0, records.memory_used.get(name, 0) - memory_held[name])
        nodes.append(
            replace(node, foreign_gpus=foreign, foreign_cpus=foreign_cpus, foreign_memory_mb=foreign_memory)
        )
    return ours, tuple(nodes), unknown


def with_all_gpus(job: SlurmJob, gpus: Mapping[str, int]) -> SlurmJob:
    """Give an exclusive job all GPUs of its nodes, as Slurm does."""
    held = {name: gpus.get(name, count) for name, count in job.gpus_per_node_held.items()}
    return replace(job, gpus_per_node_held=held)


def _placed(queue: Queue, records: NodeRecords) -> tuple[tuple[SlurmJob, ...], dict[str, str]]:
    """Give each scattered job of ours what nobody else holds there."""
    wanted = [job for job in queue.jobs if job.job_id in queue.scattered and job.spec is not None]
    if not wanted:
        return queue.jobs, {}
    gpus = {node.name: node.gpus for node in records.nodes}
    known, sharing = Counter[str](), Counter[str]()
    for job in queue.jobs:
        if job.job_id in queue.scattered:
            sharing.update(job.nodes)
        elif job.spec is not None or job.state in (JobState.RUNNING, JobState.SUSPENDED):
            known.update(job.gpus_per_node_held)
    found: dict[int, SlurmJob] = {}
    unknown: dict[str, str] = {}
    for job in wanted:
        if job.state is JobState.COMPLETING:
            most = queue.leaving.get(job.job_id, 0)
            bound = {name: min(most, gpus.get(name, 0)) for name in job.nodes}
            found[job.job_id] = replace(job, gpus_per_node_held=bound)
        elif all(sharing[name] == 1 and name in records.gpus_used for name in job.nodes) and not queue.lost:
            layout = {name: records.gpus_used[name] - known[name] for name in job.nodes}
            found[job.job_id] = replace(job, gpus_per_node_held={n: g for n, g in layout.items() if g > 0})
        else:
            found[job.job_id] = replace(job, spec=None, companion=None)
            unknown[f"job {job.job_id}"] = (
                "it did not ask for GPUs per node, and shares a node with another such job: Slurm does not tell what "
                "each of them holds"
            )
    return tuple(found.get(job.job_id, job) for job in queue.jobs), unknown
