"""Show the simulated cluster to the daemon's policy, as a Snapshot.

The snapshot holds what agents measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Node, Placement, Plan, Report, Snapshot, SnapshotJob
from polluxd.sim.applications import most_gpus
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import View
from polluxd.sim.simulated_job import Seats, SimulatedJob, node_name, placement


def nodes(view: View) -> tuple[Node, ...]:
    """The view's nodes; those that are down are not schedulable."""
    return _nodes(view.scenario, view.capacity, view.absent)


@lru_cache(maxsize=8)
def _nodes(scenario: Scenario, capacity: tuple[int, ...], absent: frozenset[int]) -> tuple[Node, ...]:
    """Return the nodes; most decisions find the same ones."""
    listed = zip(capacity, scenario.sizes, scenario.types, strict=True)
    return tuple(
        Node(node_name(i), size, kind, schedulable=room > 0, rack=scenario.rack(i))
        for i, (room, size, kind) in enumerate(listed)
        if i not in absent
    )


def seats_of(placed: Placement) -> Seats:
    return tuple((int(name[1:]), placed.gpus_per_node) for name in placed.nodes)


def slurm_job(job: SimulatedJob, view: View, **known: Any) -> SnapshotJob:
    """The job as Slurm shows it, with what else is `known`."""
    return SnapshotJob(
        job_id=job.number + 1,
        name=job.submission.name,
        user=f"user-{job.number % view.scenario.users + 1}",
        account="account",
        partition="",
        spec=spec(job, view.scenario.gpus),
        submitted_at=job.submission.time,
        age=view.now - job.submission.time,
        placement=placement(job.seats),
        **known,
    )


def report(job: SimulatedJob, view: View, *, remaining: bool, types: bool = True) -> Report | None:
    """Return what the job's agent published last; None before any fit.

    `types`: include the fits by GPU type. `remaining`: include the target, so that remaining work is known.
    """
    agent = job.agent
    params = agent.params
    if params is None:
        return None
    return Report(
        attempt=job.restarts,
        at=view.now,
        limits=job.app.limits,
        params=params,
        noise=agent.noise,
        # What earlier runs were measured on counts as measured (`polluxd.policy.feasible`).
        explored_gpus=max(agent.explored_gpus, agent.prior_gpus),
        explored_nodes=max(agent.explored_nodes, agent.prior_nodes),
        gpus=job.gpus,
        nodes=job.nodes,
        batch_size=job.total_batch,
        progress=job.progress,
        target=job.target if remaining else None,
        checkpointed=job.started_at is not None,
        first_step_at=job.started_at,
        gpu_type=agent.fitted_on,
        params_by_type=agent.by_type() if types and view.scenario.groups else {},
    )


def plan_seats(plan: Plan, jobs: Mapping[int, SimulatedJob]) -> dict[int, Seats]:
    """The plan as seats; those that a job holds keep their order."""
    found = {}
    for allocation in plan.allocations:
        job = jobs[allocation.job_id - 1]
        if allocation.placement:
            found[job.number] = seats_of(allocation.placement) if allocation.changed else job.seats
    return found


def snapshot(view: View, jobs: tuple[SnapshotJob, ...], settings: PolicySettings) -> Snapshot:
    return Snapshot("simulated", view.now, nodes(view), jobs, settings)


def spec(job: SimulatedJob, gpus: int) -> JobSpec:
    """Return the job's `#POLLUX` line.

    It allows no more GPUs than the application can use.
    """
    if job.submission.rigid:
        return _spec(job.submission.gpus, job.submission.gpus, "any")
    return _spec(1, min(most_gpus(job.app), gpus), job.submission.gpu_counts)


_spec = lru_cache(lambda least, most, counts: JobSpec(min_gpus=least, max_gpus=most, gpu_counts=counts))
