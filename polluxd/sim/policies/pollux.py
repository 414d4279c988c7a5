"""Pollux as the daemon runs it: `polluxd.policy.decide`, unchanged.

It decides on what a real daemon would know. Beyond the paper's Pollux, it uses:

    - each job's own measured restart cost
    - from the first start on, per GPU type, the fit that earlier runs of the same application left in the database
      (`polluxd.sim.agent.Memory`: it begins empty, and a fit is off by 5 % from one run to the next)
    - the training length that users declare, so that remaining work weighs
    - decisions when jobs arrive and end

As with the daemon, a job under move is left alone until it trains again and for a cooldown after that. GPU types are
told apart once a job, or an earlier run, was measured on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from polluxd.config.settings import MoveSettings, PolicySettings
from polluxd.cycle.gpu_types import GpuTypes
from polluxd.model import Report, SnapshotJob
from polluxd.policy import decide
from polluxd.policy.cloud.autoscale import desired_nodes
from polluxd.policy.listing import Cache
from polluxd.sim.applications import TYPICAL_SPEEDS
from polluxd.sim.cluster import Knowledge, Scenario
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies import daemon_view
from polluxd.sim.policies.renting_view import Renting
from polluxd.sim.simulated_job import Seats, SimulatedJob, placement

UNMEASURED_COST = MoveSettings().default_cost_s
"""Expected cost of a move until the job's own moves are measured (the daemon's `moves.default_cost_s`)."""
UNMEASURED_RESIZE_COST = MoveSettings().default_resize_cost_s
"""The same of a resize in place (the daemon's `moves.default_resize_cost_s`)."""


def _mean(costs: Sequence[Sequence[float]], otherwise: float) -> float:
    found = [seconds for group in costs for seconds in group]
    return fmean(found) if found else otherwise


class Pollux(Policy):
    """The daemon's policy."""

    chooses_batch = True
    seconds_between_fits = 30.0
    """As often as agents publish (the daemon's `agent.publish_interval_s`)."""

    def __init__(self, power: float = -1.0, knowledge: Knowledge | None = None) -> None:
        self._knowledge = knowledge or Knowledge()
        self.reacts = self._knowledge.reacts
        self.remembers = self._knowledge.remembers
        self._cache = Cache()
        self._renting = Renting()
        self._gpu_types: GpuTypes | None = None
        self.declares = self._knowledge.remaining_work
        """Agents report the lengths that users declared."""
        self.cooldown = self._knowledge.cooldown
        self.settings = PolicySettings(
            objective=self._knowledge.objective,
            kappa=self._knowledge.kappa,
            power=power,
            waiting_power=self._knowledge.waiting_power,
            remaining_work_power=self._knowledge.remaining_work_power,
            start_gpus=self._knowledge.start_gpus,
            least_gain=self._knowledge.least_gain,
            hysteresis=self._knowledge.hysteresis,
        )

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = self._jobs(view)
        plan = decide(daemon_view.snapshot(view, jobs, self.settings), cache=self._cache, explained=False)
        return daemon_view.plan_seats(plan, {job.number: job for job in view.jobs})

    def nodes_wanted(self, view: View) -> int:
        """Return the node count by price, or by the utility of the present size.

        Source of the latter: the paper, section 4.2.2, as `polluxd.policy.cloud.autoscale` implements it.
        """
        cloud = view.scenario.cloud
        assert cloud is not None
        jobs = self._jobs(view)
        if cloud.hour_value > 0:
            return self._renting.nodes_wanted(view, jobs, self.settings)
        seen = daemon_view.snapshot(view, jobs, self.settings)
        scale = desired_nodes(seen, least=cloud.least, most=cloud.most, low=cloud.low, high=cloud.high)
        return scale.nodes

    def _jobs(self, view: View) -> tuple[SnapshotJob, ...]:
        return tuple(self._job(job, view, self._report(job, view)) for job in view.jobs)

    def _job(self, job: SimulatedJob, view: View, report: Report | None) -> SnapshotJob:
        whole = bool(job.seats) and all(gpus == view.scenario.sizes[node] for node, gpus in job.seats)
        resizes = whole and view.scenario.moves is not None
        why = self._why_pinned(job, view.now)
        return daemon_view.slurm_job(
            job,
            view,
            waiting=None if job.held_at is None else view.now - job.held_at,
            report=self._on_types(report, job, view),
            pinned=bool(why),
            pin_reason=why,
            started=job.started_at is not None,
            attempt=job.restarts,
            moves=job.restarts,
            lost_seconds=job.lost_seconds,
            move_cost=_mean([c for path, c in job.costs.items() if path != "resize"], UNMEASURED_COST),
            resize_cost=_mean([job.costs.get("resize", [])], UNMEASURED_RESIZE_COST) if resizes else None,
            keeps=job.allocation.keeps if resizes else (),
        )

    def _report(self, job: SimulatedJob, view: View) -> Report | None:
        if job.started_at is None:
            return None
        found = daemon_view.report(job, view, remaining=self._knowledge.remaining_work)
        if found is None:
            return None
        agent, trains = job.agent, job.restarting <= 0
        return replace(
            found,
            explored_gpus=agent.explored_gpus,
            explored_nodes=agent.explored_nodes,
            prior_gpus=agent.prior_gpus,
            prior_nodes=agent.prior_nodes,
            first_step_at=found.first_step_at if trains else None,
        )

    def _on_types(self, found: Report | None, job: SimulatedJob, view: View) -> Report | None:
        if found is None or not view.scenario.groups:
            return found
        return self._types(view).known_to(found, placement(job.seats), moves=job.restarts)

    def _types(self, view: View) -> GpuTypes:
        """The cluster's GPU types as the daemon knows them."""
        if self._gpu_types is None:
            self._gpu_types = GpuTypes(daemon_view.nodes(view), self.speeds(view.scenario))
        return self._gpu_types

    def speeds(self, scenario: Scenario) -> dict[str, float]:
        """Return the speed of each GPU type as an administrator would configure it."""
        return {
            group.gpu_type: TYPICAL_SPEEDS.get(group.gpu_type.lower(), 1.0) * group.speed
            for group in (scenario.groups if self._knowledge.gpu_speeds else ())
            if group.gpu_type.lower() in TYPICAL_SPEEDS or group.speed != 1.0
        }

    def _why_pinned(self, job: SimulatedJob, now: float) -> str:
        if not job.seats or job.moved_at is None:
            return ""
        if job.restarting > 0:
            return "move under way"
        took = job.trains_at - job.moved_at
        if now - job.trains_at < min(self._knowledge.cooldown, took):
            return "moved lately"
        return ""
