"""Let waiting Pollux jobs wait in Slurm's own queue.

Slurm does not start a job that polluxd keeps back, and gives free GPUs to plain jobs of any priority. polluxd prevents
this. If the plan has no GPUs for a Pollux job, and plain jobs wait behind it or run in a partition of a lower tier, or
jobs run that its QOS may preempt, polluxd ends the job's lease. So it does for a job that it could never place, such as
one of two nodes where no two nodes are alike. Slurm then starts the job at its smallest size, in
Slurm's order of tiers and priorities, and preempts jobs for it if the site allows that. polluxd keeps the job back
again when there are no such jobs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

from polluxd.apply.neighbours import rank, waiting_plain_jobs, waits
from polluxd.apply.placed import geometry
from polluxd.errors import SlurmRefused
from polluxd.model import KEPT_BACK, JobState, Placement, Plan, Snapshot
from polluxd.policy.owners import beyond_share
from polluxd.slurm.protocol import ClusterState, SlurmClient, SlurmJob

log = logging.getLogger(__name__)

_NO_PLACEMENT = ("infeasible: min-gpus=", "infeasible: no placement has")
"""Reasons of `policy.feasible` that are about nodes, not about the job's batch or another limit."""
CALLS = 50
"""Most jobs that one step releases into Slurm's queue: each takes a call of some 12 ms, and the next step goes on."""


def unplaced(snapshot: Snapshot, plan: Plan) -> frozenset[int]:
    """Return the jobs without GPUs for which the plan finds none.

    They may take GPUs that become free. Jobs under a ceiling or a rule on numbers of GPUs are left out, and jobs that
    would take their user or account beyond its share, and jobs that wait for the sake of money: only polluxd enforces
    these, and Slurm does not.
    """
    settings = snapshot.settings
    if settings.gpu_counts != "any":
        return frozenset()
    placed = {allocation.job_id for allocation in plan.allocations if allocation.placement}
    found = frozenset(
        job.job_id
        for job in snapshot.jobs
        if not job.placement
        and not job.pinned
        and job.job_id not in placed
        and job.spec.gpu_counts == "any"
        and job.account not in settings.account_ceilings
        and job.user not in settings.user_ceilings
    ) - {a.job_id for a in plan.allocations if KEPT_BACK in a.reason}
    return found - beyond_share(snapshot, plan, found)


class Contender(NamedTuple):
    """A waiting job that Slurm may start by itself."""

    job: SlurmJob
    size: Placement
    """Its smallest size. Of the nodes, only the number matters."""
    before: str
    """The jobs that it comes before."""


def impossible(plan: Plan) -> frozenset[int]:
    """Return the jobs that have no placement which polluxd could make. Slurm may have one: it mixes kinds of nodes."""
    return frozenset(
        a.job_id for a in plan.allocations if not a.placement and a.reason.startswith(_NO_PLACEMENT)
    )


def contending(
    state: ClusterState, candidates: Collection[int], left: Collection[int] = ()
) -> list[Contender]:
    """Return the candidates that Slurm would start before other jobs.

    They come before some plain job, or may preempt a job by QOS, or polluxd itself could never place them (`left`).
    """
    plain = [(rank(job, state), -job.submit_time, _reach(job, state)) for job in waiting_plain_jobs(state)]
    # A waiting job comes before a running job only by its partition's tier.
    plain += [
        ((rank(job, state)[0], sys.maxsize), 0.0, frozenset(job.gpus_per_node_held))
        for job in state.jobs
        if job.spec is None and job.state is JobState.RUNNING and job.gpus_per_node_held
    ]
    by_qos: dict[str, set[str]] = {}
    for job in state.jobs:
        if job.state is JobState.RUNNING and state.rules.preempts:
            by_qos.setdefault(job.qos, set()).update(job.gpus_per_node_held)
    if not (plain or by_qos or left):
        return []
    capacity = {node.name: node.gpus for node in state.nodes}  # whoever holds them
    found = []
    for job in state.jobs:
        if job.job_id not in candidates or job.spec is None or not waits(job) or job.tasks:
            continue
        # Slurm takes --nodelist for the nodes of one placement, and one type at a time.
        if job.companion or job.demands.nodelist or job.demands.gpu_types:
            continue
        if (job.begin_time or 0.0) > state.taken_at:
            continue
        mine, reach = (rank(job, state), -job.submit_time), _reach(job, state)
        preempted = [
            qos for qos in sorted(state.rules.preempts.get(job.qos, ())) if reach & by_qos.get(qos, set())
        ]
        before = f"its QOS may preempt jobs of QOS {', '.join(preempted)}" if preempted else ""
        if job.job_id in left:
            before = "polluxd has no placement for it"
        if any(mine > (theirs, since) and reach & nodes for theirs, since, nodes in plain):
            before = before or "plain jobs come after it"
        if before:
            size = least_size(
                job.spec.min_gpus, [name for name in sorted(reach) if capacity.get(name)], capacity
            )
            if size:
                found.append(Contender(job, size, before))
    return _as_many_as_come_free(state, found)


def with_contenders(plan: Plan, contenders: Collection[Contender]) -> Plan:
    """Say in the plan's reasons which jobs Slurm may start by itself."""
    why = {
        job.job_id: f"; Slurm may start it on {size.gpus} {'GPU' if size.gpus == 1 else 'GPUs'}: {before}"
        for job, size, before in contenders
    }
    if not why:
        return plan
    allocations = (replace(one, reason=one.reason + why.get(one.job_id, "")) for one in plan.allocations)
    return replace(plan, allocations=tuple(allocations))


def least_size(gpus: int, names: list[str], capacity: dict[str, int]) -> Placement:
    """Return a placement of `gpus` GPUs on the fewest nodes.

    Empty where no equal parts of nodes make it.
    """
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
    for one in sorted(found, key=lambda f: (rank(f.job, state), -f.job.submit_time), reverse=True):
        if one.size.gpus > room:
            break
        room -= one.size.gpus
        chosen.append(one)
    return chosen


def _reach(job: SlurmJob, state: ClusterState) -> frozenset[str]:
    rules = state.rules.partitions
    known = [rules[name].nodes for name in job.partition.split(",") if name in rules]
    return frozenset().union(*known) if known else frozenset(node.name for node in state.nodes)


class Contenders:
    """The jobs whose leases polluxd has ended.

    Args:
        authorize: called before each call to Slurm.
    """

    def __init__(self, slurm: SlurmClient, authorize: Callable[[], int]) -> None:
        self._slurm = slurm
        self._authorize = authorize
        self.jobs: frozenset[int] = frozenset()

    def choose(self, chosen: Collection[Contender], now: float) -> None:
        """End the leases of the jobs that are to contend from now on.

        Every other waiting job is kept back at the next renewal.
        """
        self.jobs = frozenset(contender.job.job_id for contender in chosen)
        kept_back = [(job, size) for job, size, _ in chosen if (job.eligible_time or 0.0) > now]
        for job, size in kept_back[:CALLS]:
            self._authorize()
            try:
                self._slurm.configure(job.job_id, geometry(job, size, anywhere=True), start=True)
            except SlurmRefused as error:
                log.info("job %d: Slurm does not take it into its queue: %s", job.job_id, error)
                continue
            log.info("job %d: stands in Slurm's queue, before plain jobs that come after it", job.job_id)
