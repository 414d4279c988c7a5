"""Find GPUs that stay idle while a job that may use them waits.

The watch judges polluxd's own decisions, so it shares no rule with them. It counts free GPUs and waiting jobs as
Slurm shows them, and asks the plan for its reason only when the time is up. It errs on the side of silence: it leaves
out GPUs that Slurm plans for plain jobs, and nodes without free CPUs or memory.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from polluxd.config.value_types import replica
from polluxd.model import KEPT_BACK, Allocation, JobState, Plan
from polluxd.slurm.protocol import ClusterState, SlurmJob

INTERVALS = 5
"""Intervals between decisions after which idle GPUs beside a waiting job are a fault."""

_CONTRADICTED = frozenset(
    {
        "contention",
        "fragmentation",
        "goodput",
        "move-cost",
        "nodes",
        "counts",
        "exploration",
        "progress",
        "batch",
    }
)
"""Limits (`Explanation.limit`) that do not explain why a job waits while the GPUs for its least size are idle."""


@dataclass(frozen=True, slots=True)
class IdleGpus:
    """GPUs that one waiting job could have started on."""

    job_id: int
    gpus: int
    """Idle now, on nodes that the job may use."""
    since: float
    """POSIX time from which on the job could have started."""
    reason: str
    """What polluxd's newest plan says of the job."""
    stated: bool
    """Whether that reason can be the cause: a rule, a limit or a move under way."""


class _Beside(NamedTuple):
    """A waiting job beside idle GPUs."""

    since: float
    """POSIX time from which on the job could have started."""
    unexplained_since: float
    """POSIX time from which on, in addition, no reason explains its wait."""
    gpus: int
    """Idle for it now."""


class IdleWatch:
    """Notes since when each waiting Pollux job could have started."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._seen: dict[int, _Beside] = {}

    def observe(self, state: ClusterState) -> None:
        """Take in what Slurm shows. A job that could not start for a moment counts from that moment on."""
        former, self._seen = self._seen, {}
        waiting = [job for job in state.jobs if _waits(job, state.taken_at)]
        free = free_gpus(state) if waiting else Counter[str]()
        for job in waiting:
            gpus = startable_gpus(job, state, free)
            if gpus:
                known = former.get(job.job_id, _Beside(state.taken_at, state.taken_at, gpus))
                self._seen[job.job_id] = known._replace(gpus=gpus)

    def overdue(self, plan: Plan, now: float) -> list[IdleGpus]:
        """Return the jobs that could have started for longer than the patience, the longest first.

        Time under a rule or a limit does not count once it has gone: the next plan may use the GPUs. Time of starts
        that fail counts.
        """
        found = []
        for job_id, beside in self._seen.items():
            allocation = plan.of(job_id)
            reason, stated = _cause(allocation)
            if stated and not _starts(allocation):
                self._seen[job_id] = beside._replace(unexplained_since=now)
            since = beside.since if stated else beside.unexplained_since
            if now - since > self._patience_s:
                found.append(IdleGpus(job_id, beside.gpus, since, reason, stated))
        return sorted(found, key=lambda one: (one.since, one.job_id))


def _starts(allocation: Allocation | None) -> bool:
    """Tell whether the plan starts the job, or a start is under way."""
    if allocation is None:
        return False
    explanation = allocation.explanation
    return bool(allocation.placement) or (explanation is not None and explanation.limit == "stays")


def _cause(allocation: Allocation | None) -> tuple[str, bool]:
    if allocation is None:
        return "the job takes no part in the decision", False
    explanation = allocation.explanation
    if allocation.placement or KEPT_BACK in allocation.reason:
        return allocation.reason, True  # it is being started, or money is the reason
    if explanation is None:
        return allocation.reason, allocation.reason.startswith("infeasible:")
    return allocation.reason, explanation.limit not in _CONTRADICTED


def _waits(job: SlurmJob, now: float) -> bool:
    """Whether a Pollux job waits for nothing that its user set."""
    own = job.held_by_user or job.dependent or (job.begin_time or 0.0) > now
    # Tasks that still share one record of Slurm can wait for their user's own limit (--array=0-9%2).
    own = own or bool(job.tasks and job.demands.array_limit)
    return job.spec is not None and job.state is JobState.PENDING and not (own or job.companion)


def free_gpus(state: ClusterState) -> Counter[str]:
    """Return by node the GPUs that no job holds, and that Slurm does not plan for a plain job."""
    held = Counter[str]()
    for job in state.jobs:
        if job.spec is not None:
            held.update(job.gpus_per_node_held)
    planned = {
        name
        for job in state.jobs
        if job.spec is None and job.state is JobState.PENDING
        for name in job.planned_nodes
    }
    return Counter(
        {
            node.name: max(node.gpus - node.foreign_gpus - held[node.name], 0)
            for node in state.nodes
            if node.schedulable and node.power == "on" and node.name not in planned
        }
    )


def startable_gpus(job: SlurmJob, state: ClusterState, free: Counter[str]) -> int:
    """Return the idle GPUs on nodes that `job` may use; 0 where its least size fits nowhere.

    A job on several nodes takes them whole, as polluxd places it.
    """
    spec = job.spec
    assert spec is not None
    if free.total() < spec.min_gpus:
        return 0
    rules = state.rules.partitions
    partitions = {name for name in job.partition.split(",") if name not in rules or rules[name].starts}
    cpus, memory = _in_use(state)
    usable = {}
    for node in state.nodes:
        if (node.partitions and partitions.isdisjoint(node.partitions)) or job.demands.refuses(node):
            continue
        asked = spec.mem_per_gpu_mb or min(job.mem_per_gpu_mb, node.memory_mb // max(node.gpus, 1))
        room = [free[node.name]]
        if node.cpus:
            cores = (node.cpus - cpus[node.name]) // node.cpus_per_core
            room.append(cores * (1 if spec.one_thread else node.cpus_per_core) // spec.cpus_per_gpu)
        if node.memory_mb and asked:
            room.append((node.memory_mb - memory[node.name]) // asked)
        usable[node.name] = max(min(room), 0)
    capacity = {node.name: node.gpus for node in state.nodes}
    return sum(usable.values()) if _fits(job, usable, capacity) else 0


def _in_use(state: ClusterState) -> tuple[Counter[str], Counter[str]]:
    """Return CPUs and memory [MB] in use by node."""
    cpus = Counter({node.name: node.foreign_cpus for node in state.nodes})
    memory = Counter({node.name: node.foreign_memory_mb for node in state.nodes})
    for job in state.jobs:
        if job.spec is not None:
            cpus.update(job.cpus_per_node_held)
            memory.update({name: gpus * job.mem_per_gpu_mb for name, gpus in job.gpus_per_node_held.items()})
    return cpus, memory


def _fits(job: SlurmJob, usable: dict[str, int], capacity: dict[str, int]) -> bool:
    """Whether the least size of the job fits, on one node or on whole nodes."""
    for gpus in _least_sizes(job, capacity):
        if any(free >= gpus for free in usable.values()):
            return True
        whole = Counter(free for name, free in usable.items() if free and free == capacity[name])
        if any(gpus % size == 0 and number >= gpus // size for size, number in whole.items()):
            return True
    return False


def _least_sizes(job: SlurmJob, capacity: dict[str, int]) -> Sequence[int]:
    """The least number of GPUs that the job's own rule allows; by node size for whole nodes."""
    spec = job.spec
    assert spec is not None
    least, rule = spec.min_gpus, spec.gpu_counts
    if job.demands.exclusive or rule == "whole-nodes":
        return sorted({-(-least // size) * size for size in capacity.values() if size})
    if rule == "powers-of-two":
        return [1 << (least - 1).bit_length()]
    if unit := replica(rule):
        return [-(-least // unit) * unit]
    if rule != "any":
        return [min((int(n) for n in rule.split(",") if int(n) >= least), default=least)]
    return [least]


def remarked(plan: Plan, idle: Sequence[IdleGpus], now: float) -> Plan:
    """Return the plan with a remark in the reason of each job whose wait nothing explains."""
    return plan.with_remarks(
        {
            one.job_id: f"; {one.gpus} GPUs that it may use have been idle for {now - one.since:.0f} s, and no rule "
            "explains the wait: tell an administrator"
            for one in idle
            if not one.stated
        }
    )


PREFIX = "idle since "
"""Begins the part of a cycle's note that `polluxctl status` reports as a fault."""


def note(idle: Sequence[IdleGpus]) -> str:
    """Return the text for `polluxctl status`: the job that waits longest. Empty where every wait is explained."""
    unexplained = [one for one in idle if not one.stated]
    if not unexplained:
        return ""
    first, more = unexplained[0], len(unexplained) - 1
    others = f", and {more} more jobs wait so" if more else ""
    # Semicolons separate the parts of a note.
    reason = first.reason.replace(";", ",")
    return (
        f"{PREFIX}{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime(first.since))}: {first.gpus} GPUs that job "
        f"{first.job_id} may use, while it waits{others} (polluxd's reason: {reason})"
    )
