"""Let waiting Pollux jobs wait in Slurm's own queue.

Slurm does not start a job that polluxd keeps back, and gives free GPUs to plain jobs of any priority. polluxd prevents
this. If the plan has no GPUs for a Pollux job, and plain jobs wait behind it or run in a partition of a lower tier,
polluxd ends the job's lease. Slurm then starts the job at its smallest size, in Slurm's order of tiers and priorities,
and preempts plain jobs for it if the site allows that. polluxd keeps the job back again when there are no such plain
jobs.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Sequence

from polluxd.apply.neighbours import rank, waiting_plain_jobs, waits
from polluxd.apply.placed import geometry
from polluxd.errors import SlurmRefused
from polluxd.model import JobState, Placement, Plan, Snapshot
from polluxd.policy.owners import beyond_share
from polluxd.slurm.protocol import ClusterState, SlurmClient, SlurmJob

log = logging.getLogger(__name__)

CALLS = 50
"""Most jobs that one step releases into Slurm's queue: each takes a call of some 12 ms, and the next step goes on."""


def unplaced(snapshot: Snapshot, plan: Plan) -> frozenset[int]:
    """Return the jobs without GPUs for which the plan finds none.

    They may take GPUs that become free. Jobs under a ceiling or a rule on numbers of GPUs are left out, and jobs that
    would take their user or account beyond its share: only polluxd enforces these, and Slurm does not.
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
    )
    return found - beyond_share(snapshot, plan, found)


def contending(state: ClusterState, candidates: Collection[int]) -> list[tuple[SlurmJob, Placement]]:
    """Return the candidates before some plain job, and their smallest sizes.

    Of the nodes of such a placement, only the number matters.
    """
    plain = [(rank(job, state), -job.submit_time, _reach(job, state)) for job in waiting_plain_jobs(state)]
    # A waiting job comes before a running job only by its partition's tier.
    plain += [
        ((rank(job, state)[0], sys.maxsize), 0.0, frozenset(job.gpus_per_node_held))
        for job in state.jobs
        if job.spec is None and job.state is JobState.RUNNING and job.gpus_per_node_held
    ]
    if not plain:
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
        if any(mine > (theirs, since) and reach & nodes for theirs, since, nodes in plain):
            size = least_size(
                job.spec.min_gpus, [name for name in sorted(reach) if capacity.get(name)], capacity
            )
            if size:
                found.append((job, size))
    return found


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


def _as_many_as_come_free(
    state: ClusterState, found: Sequence[tuple[SlurmJob, Placement]]
) -> list[tuple[SlurmJob, Placement]]:
    """Return the first jobs in Slurm's order, as many as GPUs may come free.

    These are the free GPUs, all that plain jobs hold, and those of the largest Pollux job.
    """
    ours = [sum(job.gpus_per_node_held.values()) for job in state.jobs if job.spec is not None]
    room = sum(node.gpus for node in state.nodes if node.schedulable) - sum(ours) + max(ours, default=0)
    chosen = []
    for job, size in sorted(found, key=lambda f: (rank(f[0], state), -f[0].submit_time), reverse=True):
        if size.gpus > room:
            break
        room -= size.gpus
        chosen.append((job, size))
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

    def choose(self, state: ClusterState, candidates: Collection[int]) -> None:
        """End the leases of the jobs that are to contend from now on.

        Every other waiting job is kept back at the next renewal.
        """
        chosen = _as_many_as_come_free(state, contending(state, candidates))
        self.jobs = frozenset(job.job_id for job, _ in chosen)
        kept_back = [(job, size) for job, size in chosen if (job.eligible_time or 0.0) > state.taken_at]
        for job, size in kept_back[:CALLS]:
            self._authorize()
            try:
                self._slurm.configure(job.job_id, geometry(job, size, anywhere=True), start=True)
            except SlurmRefused as error:
                log.info("job %d: Slurm does not take it into its queue: %s", job.job_id, error)
                continue
            log.info("job %d: stands in Slurm's queue, before plain jobs that come after it", job.job_id)
