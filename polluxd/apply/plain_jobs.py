"""Share the cluster with plain jobs: jobs without a `#POLLUX` line, which Slurm alone starts.

A plain job may come before every waiting Pollux job, by partition tier and priority. polluxd then places no job on the
free GPUs of its nodes. Slurm may also have planned the plain job on nodes where Pollux jobs hold more than their
smallest sizes. Without polluxd these jobs would not have grown, so polluxd takes the GPUs above their smallest sizes if
the plain job can start with them.

The other way round, Slurm does not start a job that polluxd keeps back, and gives free GPUs to plain jobs of any
priority. If the plan has no GPUs for a Pollux job, and plain jobs wait behind it or run in a partition of a lower tier,
or jobs run that its QOS may preempt, polluxd ends the job's lease. So it does for a job that it could never place, such
as one of two nodes where no two nodes are alike. Slurm then starts the job at its smallest size, in Slurm's order of
tiers and priorities, and preempts jobs for it if the site allows that. polluxd keeps the job back again when there are
no such jobs.

All functions here are pure.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from math import ceil
from typing import NamedTuple

from polluxd.apply.limit_scopes import Lookup
from polluxd.model import KEPT_BACK, JobState, Move, Placement, Plan, Snapshot, SnapshotJob
from polluxd.policy.owners import beyond_share
from polluxd.slurm.protocol import ClusterState, SlurmJob

_WAITS_FOR_NODES = ("Resources", "Priority")
"""squeue(1), JOB REASON CODES: the job waits only for free nodes."""
_FOR_OTHERS = re.compile(r"Resources|Priority|Assoc|QOS|Max")
"""It waits for what other jobs hold."""
_RESTED = 20
"""Times the patience after which GPUs may idle for a user's plain jobs again."""
_NO_PLACEMENT = ("infeasible: min-gpus=", "infeasible: no placement has")
"""Reasons of `policy.feasible` that are about nodes, not about the job's batch or another limit."""


def left_to_plain_jobs(
    state: ClusterState,
    ours: Iterable[SnapshotJob],
    others: Mapping[str, int],
    *,
    shrink: bool = True,
    idle_for: Callable[[int, float], bool] = lambda _uid, _now: True,
    admitted: Collection[int] = (),
) -> Counter[str]:
    """Return the GPUs by node left to plain jobs.

    Args:
        ours: the jobs that the policy places, each with what it holds, or will hold when its move ends.
        others: GPUs by node that further jobs of Pollux hold.
        shrink: every number of GPUs from min-gpus up is allowed, so that jobs can give any back.
        idle_for: whether plain jobs of a user may keep GPUs idle now that they cannot start with.
        admitted: plain jobs that a limit keeps out until jobs of Pollux have given way within it.
    """
    left: Counter[str] = Counter()
    plain = _waiting_plain_jobs(state, admitted)
    if not plain:
        return left
    mine = [job for job in state.jobs if job.spec is not None]
    first = max((_rank(job, state) for job in mine if _waits(job)), default=(0, 0))
    # A Pollux job that runs may grow: the tier of its partition comes before plain jobs of lower tiers.
    # Slurm lists ended jobs for MinJobAge.
    holding = [job for job in mine if not job.state.finished and job.state is not JobState.PENDING]
    tier = max((_rank(job, state)[0] for job in holding), default=0)
    free = Counter({node.name: node.capacity - others.get(node.name, 0) for node in state.nodes})
    growths = []
    for one in ours:
        for name in one.placement.nodes:
            free[name] -= one.placement.gpus_per_node
        if shrink and one.placement and not one.pinned and one.spec.gpu_counts == "any":
            growths.append(_Growth(one))
    for job in sorted(plain, key=lambda job: _rank(job, state), reverse=True):
        if _rank(job, state) <= first or _rank(job, state)[0] < tier:
            break
        taken = _take(job, state, free)
        given_back = _given_back(job, taken, growths)
        starts = sum(taken.values()) + given_back.total() >= _asks(job)
        if not starts and taken and not idle_for(job.uid, state.taken_at):
            continue
        free.subtract(taken)
        left.update(taken)
        left.update(given_back)
    return left


class IdleFor:
    """How long GPUs may idle for plain jobs of each user that cannot start with them.

    What such a job lacks, another job of its user may hold on purpose. So the time is the user's: a further job of a
    loop that submits and cancels them has none of its own.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._spans: dict[int, tuple[float, float]] = {}
        """By uid: since when, and until when, GPUs have been left idle."""

    def __call__(self, uid: int, now: float) -> bool:
        since, until = self._spans.get(uid, (now, now))
        if now - until > _RESTED * self._patience_s:
            since = now
        self._spans[uid] = since, now
        return now - since <= self._patience_s


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
            self.nodes = self.nodes - {name}


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


def _take(job: SlurmJob, state: ClusterState, free: Mapping[str, int]) -> dict[str, int]:
    """Free GPUs for the job.

    They are on the nodes that Slurm plans for it, else on those with the most GPUs, of the type that the job asks for.
    """
    kinds = job.demands.gpu_types
    others = {node.name for node in state.nodes if kinds and kinds.isdisjoint(node.gpu_type.split("+"))}
    reach = state.reach(job.partition) - others
    names = job.planned_nodes or sorted(reach, key=lambda name: (-free.get(name, 0), name))
    wanted, taken = _asks(job), {}
    for name in names:
        gpus = min(max(free.get(name, 0), 0), wanted, job.requested_gpus_per_node or wanted)
        if gpus > 0:
            taken[name] = gpus
            wanted -= gpus
    return taken


def unplaced(snapshot: Snapshot, plan: Plan) -> frozenset[int]:
    """Return the jobs without GPUs for which the plan finds none.

    They may take GPUs that become free. Jobs under a ceiling or a rule on numbers of GPUs are left out, and jobs that
    would take their user or account beyond its share, and jobs that wait for the sake of money: only polluxd enforces
    these, and Slurm does not.
    """
    settings = snapshot.settings
    if settings.gpu_counts != "any":
        return frozenset()
    placed = {a.job_id for a in plan.allocations if a.placement or KEPT_BACK in a.reason}
    found = frozenset(
        job.job_id
        for job in snapshot.jobs
        if not job.placement
        and not job.pinned
        and job.job_id not in placed
        and job.spec.gpu_counts == "any"
        and job.account not in settings.account_ceilings
        and job.user not in settings.user_ceilings
    )
    return found - beyond_share(snapshot, plan, found)


def impossible(plan: Plan) -> frozenset[int]:
    """Return the jobs that have no placement which polluxd could make. Slurm may have one: it mixes kinds of nodes."""
    return frozenset(
        a.job_id for a in plan.allocations if not a.placement and a.reason.startswith(_NO_PLACEMENT)
    )


class Contender(NamedTuple):
    """A waiting job that Slurm may start by itself."""

    job: SlurmJob
    size: Placement
    """Its smallest size. Of the nodes, only the number matters."""
    before: str
    """The jobs that it comes before."""


def contending(
    state: ClusterState, candidates: Collection[int], left: Collection[int] = ()
) -> list[Contender]:
    """Return the candidates that Slurm would start before other jobs.

    They come before some plain job, or may preempt a job by QOS, or polluxd itself could never place them (`left`).
    """
    running = [job for job in state.jobs if job.state is JobState.RUNNING]
    plain = _plain_jobs_in_order(state, running)
    by_qos: dict[str, set[str]] = {}
    for job in running if state.rules.preempts else ():
        by_qos.setdefault(job.qos, set()).update(job.gpus_per_node_held)
    if not (plain or by_qos or left):
        return []
    capacity = {node.name: node.gpus for node in state.nodes}  # whoever holds them
    found = []
    for job in state.jobs:
        if job.job_id not in candidates or job.spec is None or not _may_start_alone(job, state.taken_at):
            continue
        mine, reach = _order(job, state), state.reach(job.partition)
        preempts = state.rules.preempts.get(job.qos, frozenset())
        preempted = [qos for qos in sorted(preempts) if reach & by_qos.get(qos, set())]
        if job.job_id in left:
            before = "polluxd has no placement for it"
        elif preempted:
            before = f"its QOS may preempt jobs of QOS {', '.join(preempted)}"
        elif any(mine > theirs and reach & nodes for theirs, nodes in plain):
            before = "plain jobs come after it"
        else:
            continue
        names = [name for name in sorted(reach) if capacity.get(name)]
        if size := least_size(job.spec.min_gpus, names, capacity):
            found.append(Contender(job, size, before))
    return _as_many_as_come_free(state, found)


def _plain_jobs_in_order(
    state: ClusterState, running: Collection[SlurmJob]
) -> list[tuple[tuple[tuple[int, int], float], frozenset[str]]]:
    """The plain jobs that wait or run: place in Slurm's order, and nodes."""
    waiting = [(_order(job, state), state.reach(job.partition)) for job in _waiting_plain_jobs(state)]
    # A waiting job comes before a running job only by its partition's tier.
    return waiting + [
        (((_rank(job, state)[0], sys.maxsize), 0.0), frozenset(job.gpus_per_node_held))
        for job in running
        if job.spec is None and job.gpus_per_node_held
    ]


def _may_start_alone(job: SlurmJob, now: float) -> bool:
    """Whether Slurm may start the waiting job by itself, on nodes that polluxd need not choose."""
    if not _waits(job) or job.tasks or (job.begin_time or 0.0) > now:
        return False
    # Slurm takes --nodelist for the nodes of one placement, and one type at a time.
    return not (job.companion or job.demands.nodelist or job.demands.gpu_types)


def with_contenders(plan: Plan, contenders: Collection[Contender]) -> Plan:
    """Say in the plan's reasons which jobs Slurm may start by itself."""
    why = {
        job.job_id: f"; Slurm may start it on {size.gpus} {'GPU' if size.gpus == 1 else 'GPUs'}: {before}"
        for job, size, before in contenders
    }
    return plan.with_remarks(why)


def least_size(gpus: int, names: list[str], capacity: dict[str, int]) -> Placement:
    """Return a placement of `gpus` GPUs on the fewest nodes; empty where no equal parts of nodes make it."""
    for count in range(1, len(names) + 1):
        if gpus % count:
            continue
        fitting = [name for name in names if capacity[name] >= gpus // count]
        if len(fitting) >= count:
            return Placement(tuple(fitting[:count]), gpus // count)
    return Placement()


def _as_many_as_come_free(state: ClusterState, found: Sequence[Contender]) -> list[Contender]:
    """Return the first jobs in Slurm's order, as many as GPUs may come free.

    These are the free GPUs, all that plain jobs hold, and those of the largest Pollux job.
    """
    ours = [sum(job.gpus_per_node_held.values()) for job in state.jobs if job.spec is not None]
    room = sum(node.gpus for node in state.nodes if node.schedulable) - sum(ours) + max(ours, default=0)
    chosen = []
    for one in sorted(found, key=lambda f: _order(f.job, state), reverse=True):
        if one.size.gpus > room:
            break
        room -= one.size.gpus
        chosen.append(one)
    return chosen


def at_risk(state: ClusterState, contending: Collection[int] = ()) -> dict[int, str]:
    """Return the running jobs of Pollux whose place another job could take at a requeue, and why.

    A requeued job cannot start for a second. Slurm then gives what it has left to any job that fits: one that waits for
    nodes, or for a limit that counts both. Only Slurm knows what a plain job needs besides GPUs and CPUs. Behind one of
    higher priority that waits for nodes, it starts none on nodes of that one's partition, whether that one fits or not.

    Args:
        contending: jobs of Pollux that Slurm may start by itself, as it may start every plain job.
    """
    waiting = (job for job in state.jobs if _waits(job) and _FOR_OTHERS.match(job.reason))
    plain = [job for job in waiting if job.spec is None or job.job_id in contending]
    mine = [job for job in state.jobs if job.spec is not None and job.state is JobState.RUNNING]
    if not (plain and mine):
        return {}
    bounds, room, found = Lookup(state), _Room(state, mine), {}
    for other in plain:
        reach, limits = state.reach(other.partition), _limits_of(other, bounds)
        for job in mine:
            if other.reason in _WAITS_FOR_NODES:
                first = _rank(other, state) > _rank(job, state) and reach & job.gpus_per_node_held.keys()
                takes = bool(first) or room.could_start(other, job, reach)
            else:
                takes = not limits.isdisjoint(_limits_of(job, bounds))
            if takes:
                found[job.job_id] = f"job {other.job_id} ({other.reason}), which Slurm may start before it,"
    return found


class _Room:
    """The GPUs and CPUs that nobody holds, by node."""

    def __init__(self, state: ClusterState, mine: Iterable[SlurmJob]) -> None:
        self._free = Counter({node.name: node.capacity for node in state.nodes if node.schedulable})
        self._idle = Counter({node.name: node.cpus - node.foreign_cpus for node in state.nodes if node.cpus})
        self._counted = {node.name for node in state.nodes if node.cpus}
        for job in mine:
            self._free.subtract(job.gpus_per_node_held)
            self._idle.subtract(job.cpus_per_node_held)

    def could_start(self, other: SlurmJob, job: SlurmJob, reach: Collection[str]) -> bool:
        """Whether a job fits on what is free and what another one holds, and not without the latter."""
        nodes = max(other.tres.get("node", 1), 1)
        gpus = other.requested_gpus_per_node or ceil(_asks(other) / nodes)
        cpus = ceil(other.tres.get("cpu", 0) / nodes)
        fits = {
            name
            for name in reach
            if self._free[name] + job.gpus_per_node_held.get(name, 0) >= gpus
            and (name not in self._counted or self._idle[name] + job.cpus_per_node_held.get(name, 0) >= cpus)
        }
        return len(fits) >= nodes and not fits.isdisjoint(job.gpus_per_node_held)


def taken_by(risks: Mapping[int, str], move: Move) -> str:
    """Return which plain job could take the place of a requeued job that gives nothing back; empty: none."""
    none = move.path != "requeue" or move.gives_back or move.job_id not in risks
    return "" if none else f"{risks[move.job_id]} comes first"


def _limits_of(job: SlurmJob, bounds: Lookup) -> frozenset[str]:
    """Which limits count the job together with others."""
    return frozenset(scope.name for scope in bounds.of(job).scopes if scope.enforced)


def _waiting_plain_jobs(state: ClusterState, admitted: Collection[int] = ()) -> list[SlurmJob]:
    """The plain jobs that wait for nothing but GPUs; also those that a limit is about to admit."""
    waiting = (job for job in state.jobs if job.spec is None and _waits(job) and _asks(job))
    return [job for job in waiting if job.reason in _WAITS_FOR_NODES or job.job_id in admitted]


def _waits(job: SlurmJob) -> bool:
    """Whether the job waits for nothing that its user set."""
    return job.state is JobState.PENDING and not job.held_by_user and not job.dependent


def _asks(job: SlurmJob) -> int:
    """GPUs that a waiting job asks for."""
    return job.tres.get("gres/gpu", 0) or (job.requested_gpus_per_node or 0) * max(job.tres.get("node", 1), 1)


def _rank(job: SlurmJob, state: ClusterState) -> tuple[int, int]:
    """Tier of the job's best partition, and its priority. Slurm starts the highest first."""
    return max((known.tier for known in state.rules.named(job.partition)), default=0), job.priority


def _order(job: SlurmJob, state: ClusterState) -> tuple[tuple[int, int], float]:
    """Slurm's order: of equal rank, the job that was submitted first."""
    return _rank(job, state), -job.submit_time
