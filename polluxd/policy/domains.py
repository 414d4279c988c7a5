"""Split the cluster into domains whose jobs do not compete, and hold their nodes as arrays.

Two jobs compete if the same node could hold either, or if one limit counts both. Partitions form one domain if they
share nodes or a limit, directly or through other partitions. Each domain is solved separately. This is exact, because
the objective is a sum over jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from polluxd.model import GpuLimit, Node, Placement, Snapshot, SnapshotJob

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Domain:
    """Nodes, and the jobs that compete for them; both in a fixed order."""

    nodes: tuple[Node, ...]
    jobs: tuple[SnapshotJob, ...]
    limits: tuple[GpuLimit, ...] = ()
    """Slurm's, on GPUs of several jobs."""

    @cached_property
    def capacity(self) -> int:
        """GPUs that our jobs may hold here."""
        return sum(n.capacity for n in self.nodes)

    def rooms(self, jobs: Sequence[SnapshotJob]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return the parts of the domain that some jobs cannot leave.

        Each is the jobs' numbers and the numbers of the nodes that they may use.
        """
        kinds = partitions_of_each(jobs)
        reach = {p: tuple(i for i, n in enumerate(self.nodes) if eligible(p, n)) for p in set(kinds)}
        found = []
        for nodes in sorted(set(reach.values())):
            if len(nodes) < len(self.nodes):
                inside = {p for p, own in reach.items() if set(own) <= set(nodes)}
                found.append((tuple(j for j, kind in enumerate(kinds) if kind in inside), nodes))
        return found

    @cached_property
    def gpus_per_node(self) -> int:
        """Return the most common node size, the larger on a tie; at least 1."""
        sizes = [n.gpus for n in self.nodes if n.gpus > 0]
        return max(set(sizes), key=lambda g: (sizes.count(g), g), default=1)


def partitions_of(job: SnapshotJob) -> frozenset[str]:
    """Return the partitions of the job; Slurm separates them by commas."""
    return _partitions(job.partition)


def partitions_of_each(jobs: Sequence[SnapshotJob]) -> list[frozenset[str]]:
    """Return the partitions of each job; most jobs name the same ones."""
    known = {names: _partitions(names) for names in {job.partition for job in jobs}}
    return [known[job.partition] for job in jobs]


@lru_cache(maxsize=4096)
def _partitions(names: str) -> frozenset[str]:
    return frozenset(p for p in names.split(",") if p)


def eligible(partitions: frozenset[str], node: Node) -> bool:
    """Return whether a job of these partitions may use the node.

    A node that names no partition is open to all.
    """
    return not node.partitions or not partitions or not partitions.isdisjoint(node.partitions)


def split(snapshot: Snapshot) -> list[Domain]:
    """Split the snapshot into domains, in order of their first node's name.

    Jobs without any node come last.
    """
    nodes = sorted(snapshot.nodes, key=attrgetter("name"))
    jobs = sorted(snapshot.jobs, key=attrgetter("job_id"))
    kinds = {j.partition for j in jobs}
    wanted = {_partitions(names) for names in kinds}
    group = _Groups()
    # A node or a job without partitions joins all partitions to one domain.
    open_to_all = any(not n.partitions for n in nodes) or frozenset() in wanted
    if open_to_all:
        group.join([*(p for n in nodes for p in n.partitions), *(p for w in wanted for p in w), ""])
    limited = [*_limited(jobs, snapshot)]
    offered = dict.fromkeys(n.partitions for n in nodes)
    for names in [*offered, *wanted, *limited]:
        group.join(names)
    root = {names: group.of(names) for names in {*offered, *wanted}}
    root_of = {names: root[_partitions(names)] for names in kinds}
    if len({*root.values()}) == 1:
        return [Domain(tuple(nodes), tuple(jobs), snapshot.limits)] if jobs else []
    members: dict[str, tuple[list[Node], list[SnapshotJob]]] = {}
    for node in nodes:
        members.setdefault(root[node.partitions], ([], []))[0].append(node)
    for job in jobs:
        members.setdefault(root_of[job.partition], ([], []))[1].append(job)
    return [Domain(tuple(ns), tuple(js), snapshot.limits) for ns, js in members.values() if js]


def _limited(jobs: Sequence[SnapshotJob], snapshot: Snapshot) -> list[list[str]]:
    """Return the partitions of the jobs of each limit.

    One limit is kept in one domain.
    """
    settings = snapshot.settings
    accounts = {*settings.account_ceilings, *settings.account_guarantees}
    users = {*settings.user_ceilings, *settings.user_guarantees}
    found: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        for kind, name, names in (("account", job.account, accounts), ("user", job.user, users)):
            if name in names:
                found.setdefault((kind, name), []).extend(partitions_of(job))
    partitions = {job.job_id: partitions_of(job) for job in jobs} if snapshot.limits else {}
    return [
        *found.values(),
        *([p for job_id in limit.jobs for p in partitions.get(job_id, ())] for limit in snapshot.limits),
    ]


class _Groups:
    """Disjoint sets of partition names."""

    def __init__(self) -> None:
        self._parent: dict[str, str] = {}

    def _root(self, name: str) -> str:
        parent = self._parent.setdefault(name, name)
        if parent != name:
            parent = self._parent[name] = self._root(parent)
        return parent

    def join(self, names: Iterable[str]) -> None:
        roots = sorted({self._root(n) for n in names})
        for root in roots[1:]:
            self._parent[root] = roots[0]

    def of(self, names: Iterable[str]) -> str:
        return self._root(min(names, default=""))


def gpu_types(domain: Domain) -> tuple[str, ...]:
    """Return the GPU types that make a difference to some job.

    Empty if all types are the same to all jobs.
    """
    found = tuple(sorted({n.gpu_type for n in domain.nodes if n.gpus > 0}))
    if len(found) < 2:
        return ()
    for job in domain.jobs:
        report = job.report
        if report is None or report.params is None or not report.params_by_type:
            continue
        if len({(report.params_by_type.get(t, report.params), report.limits_on(t)) for t in found}) > 1:
            return found
    return ()


def racks(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the racks of nodes with GPUs, in order; none for one rack."""
    found = tuple(sorted({n.rack for n in nodes if n.gpus > 0}))
    return found if len(found) > 1 else ()


def is_rack_aware(job: SnapshotJob) -> bool:
    """Return whether the job was measured over racks.

    If not, the policy makes no difference between one rack and several for this job.
    """
    report = job.report
    if report is None or report.params is None:
        return False
    return any(fit.alpha_rack is not None for fit in (report.params, *report.params_by_type.values()))


def classes(nodes: Sequence[Node]) -> dict[tuple[str, int], list[int]]:
    """Return node numbers by (GPU type, size).

    A multi-node placement stays within one class.
    """
    found: dict[tuple[str, int], list[int]] = {}
    for number, node in enumerate(nodes):
        if node.gpus > 0:
            found.setdefault((node.gpu_type, node.gpus), []).append(number)
    return found


Seat = tuple[tuple[int, ...], int]
"""Node numbers and GPUs on each."""

NOWHERE: Seat = ((), 0)
_UNLIMITED = 1 << 40


class Layout:
    """Nodes by number; nobody changes what is in it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.capacity: Ints = np.array([n.capacity for n in nodes], dtype=np.int64)
        """Per node, GPUs that our jobs may hold."""
        self.cpus: Ints = np.array(
            [max(n.cpus - n.foreign_cpus, 0) if n.cpus > 0 else _UNLIMITED for n in nodes], dtype=np.int64
        )
        self.cpus_per_core: Ints = np.array([max(n.cpus_per_core, 1) for n in nodes], dtype=np.int64)
        self.whole_cores = bool((self.cpus_per_core > 1).any())
        """Whether CPUs and cores differ anywhere."""
        self.memory: Ints = np.array(
            [max(n.memory_mb - n.foreign_memory_mb, 0) if n.memory_mb > 0 else _UNLIMITED for n in nodes],
            dtype=np.int64,
        )
        self.classes = [(size, np.array(numbers)) for (_, size), numbers in classes(nodes).items()]
        """Size and node numbers of each class: a multi-node placement stays within one."""
        number = {name: i for i, name in enumerate(racks(nodes))}
        self.rack: Ints = np.array([number.get(n.rack, -1) for n in nodes], dtype=np.int64)
        """Per node, the number of its rack; -1 where there is but one."""
        self.position: Ints = np.array([n.position for n in nodes], dtype=np.int64)
        """Per node, its place in Slurm's order."""
        self._number = {n.name: i for i, n in enumerate(nodes)}
        self._allowed: dict[frozenset[str], Bools] = {}

    def allowed(self, partitions: frozenset[str]) -> Bools:
        """Nodes that these partitions allow."""
        found = self._allowed.get(partitions)
        if found is None:
            found = np.array([eligible(partitions, n) for n in self.nodes], dtype=np.bool_)
            self._allowed[partitions] = found
        return found

    @cached_property
    def of_type(self) -> dict[str, Bools]:
        """Nodes of each GPU type."""
        return {
            kind: np.array([n.gpu_type == kind for n in self.nodes], dtype=np.bool_)
            for kind in {n.gpu_type for n in self.nodes}
        }

    def seat(self, placement: Placement) -> Seat:
        """The seat that a placement is, as far as its nodes are known here."""
        nodes, number = placement.nodes, self._number
        if len(nodes) == 1:
            own = number.get(nodes[0])
            return NOWHERE if own is None else ((own,), placement.gpus_per_node)
        if not nodes:
            return NOWHERE
        numbers = tuple(sorted(number[n] for n in nodes if n in number))
        return (numbers, placement.gpus_per_node) if numbers else NOWHERE
