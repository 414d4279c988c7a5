"""Leave GPUs to plain jobs that Slurm is about to start.

A plain job (a job without a `#POLLUX` line) may come before every waiting Pollux job, by partition tier and priority.
polluxd then places no job on the free GPUs of its nodes. Slurm may also have planned the plain job on nodes where
Pollux jobs hold more than their smallest sizes. Without polluxd these jobs would not have grown, so polluxd takes the
GPUs above their smallest sizes if the plain job can start with them. All functions here are pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy

from polluxd.model import JobState, SnapshotJob
from polluxd.slurm.protocol import ClusterState, SlurmJob

_WAITS_FOR_NODES = ("Resources", "Priority")
"""squeue(1), JOB REASON CODES: the job waits only for free nodes."""


def left_to_plain_jobs(
    state: ClusterState, ours: Iterable[SnapshotJob], others: Mapping[str, int], *, shrink: bool = True
) -> tuple[Counter[str], tuple[int, ...]]:
    """Return the GPUs by node left to plain jobs, and these jobs.

    Args:
        ours: the jobs that the policy places, each with what it holds, or will hold when its move ends.
        others: GPUs by node that further jobs of Pollux hold.
        shrink: every number of GPUs from min-gpus up is allowed, so that jobs can give any back.
    """
    plain = waiting_plain_jobs(state)
    if not plain:
        return Counter(), ()
    waiting = [job for job in state.jobs if job.spec is not None and waits(job)]
    first = max((rank(job, state) for job in waiting), default=(0, 0))
    # A Pollux job that runs may grow: the tier of its partition comes before plain jobs of lower tiers.
    tier = max((rank(job, state)[0] for job in state.jobs if job.spec is not None and _holds(job)), default=0)
    free = Counter({node.name: node.capacity - others.get(node.name, 0) for node in state.nodes})
    growths = []
    for one in ours:
        for name in one.placement.nodes:
            free[name] -= one.placement.gpus_per_node
        if shrink and one.placement and not one.pinned and one.spec.gpu_counts == "any":
            growths.append(_Growth(one))
    left: Counter[str] = Counter()
    found = []
    for job in sorted(plain, key=lambda job: rank(job, state), reverse=True):
        if rank(job, state) <= first or rank(job, state)[0] < tier:
            break
        taken = _take(job, state, free)
        free.subtract(taken)
        left.update(taken)
        returned = _given_back(job, taken, growths)
        left.update(returned)
        if taken or returned:
            found.append(job.job_id)
    return left, tuple(found)


class _Growth:
    """The GPUs of a running Pollux job above its smallest size."""

    def __init__(self, job: SnapshotJob) -> None:
        self.nodes = set(job.placement.nodes)
        self.per_node = job.placement.gpus_per_node
        self.least = job.spec.min_gpus

    def gives(self, name: str, gpus: int) -> int:
        """Return how many of `gpus` GPUs the job can do without on a node.

        A job on several nodes gives whole nodes, so that it keeps a size that it may have.
        """
        if name not in self.nodes:
            return 0
        if len(self.nodes) == 1:
            return min(gpus, max(self.per_node - self.least, 0))
        return min(gpus, self.per_node) if (len(self.nodes) - 1) * self.per_node >= self.least else 0

    def give(self, name: str, gpus: int) -> None:
        if len(self.nodes) == 1:
            self.per_node -= gpus
        else:
            self.nodes.remove(name)


def _given_back(job: SlurmJob, taken: Mapping[str, int], growths: list[_Growth]) -> Counter[str]:
    """Return GPUs by node that growths give back for a plain job.

    Empty where the job could not start with them, or where Slurm names no nodes: only Slurm knows all demands of a
    plain job.
    """
    wanted, found = _asks(job) - sum(taken.values()), Counter[str]()
    tried = [copy(growth) for growth in growths]
    for name in job.planned_nodes:
        most = job.requested_gpus_per_node or wanted
        for growth in tried:
            lacking = min(wanted, most - taken.get(name, 0) - found[name])
            if lacking > 0 and (gpus := growth.gives(name, lacking)):
                growth.give(name, gpus)
                found[name] += gpus
                wanted -= gpus
    if wanted > 0:
        return Counter()
    growths[:] = tried
    return found


def waiting_plain_jobs(state: ClusterState) -> list[SlurmJob]:
    """The plain jobs that wait for nothing but GPUs."""
    return [job for job in state.jobs if job.spec is None and _ready(job) and _asks(job)]


def _take(job: SlurmJob, state: ClusterState, free: Mapping[str, int]) -> dict[str, int]:
    """Free GPUs for the job.

    They are on the nodes that Slurm plans for it, else on those with the most GPUs, of the type that the job asks for.
    """
    kinds = job.demands.gpu_types
    others = {node.name for node in state.nodes if kinds and kinds.isdisjoint(node.gpu_type.split("+"))}
    rules = [state.rules.partitions[p].nodes for p in job.partition.split(",") if p in state.rules.partitions]
    reach = frozenset().union(*rules) if rules else frozenset(free)
    names = job.planned_nodes or sorted(reach - others, key=lambda name: (-free.get(name, 0), name))
    wanted, taken = _asks(job), {}
    for name in names:
        gpus = min(max(free.get(name, 0), 0), wanted, job.requested_gpus_per_node or wanted)
        if gpus > 0:
            taken[name] = gpus
            wanted -= gpus
    return taken


def _ready(job: SlurmJob) -> bool:
    return waits(job) and job.reason in _WAITS_FOR_NODES


def _holds(job: SlurmJob) -> bool:
    """Whether the job has left the queue and has not ended.

    Slurm lists ended jobs for MinJobAge.
    """
    return not job.state.finished and job.state is not JobState.PENDING


def waits(job: SlurmJob) -> bool:
    """Whether the job waits for nothing that its user set."""
    return job.state is JobState.PENDING and not job.held_by_user and not job.dependent


def _asks(job: SlurmJob) -> int:
    """GPUs that a waiting job asks for."""
    return job.tres.get("gres/gpu", 0) or (job.requested_gpus_per_node or 0) * max(job.tres.get("node", 1), 1)


def rank(job: SlurmJob, state: ClusterState) -> tuple[int, int]:
    """Tier of the job's best partition, and its priority.

    Slurm starts the highest first.
    """
    tiers = [
        state.rules.partitions[name].tier
        for name in job.partition.split(",")
        if name in state.rules.partitions
    ]
    return max(tiers, default=0), job.priority
