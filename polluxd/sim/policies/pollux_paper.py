"""Pollux as published: its objective and constants, solved exactly.

Source: Qiao et al., OSDI 2021.

Fitness is the power mean (p = -1) of fair-share speedups over GPUs per node. A change of a job's nodes multiplies its
speedup by max(T - 30 R, 0) / (T + 30), first starts included, as in the artifact. Jobs know what they measured
themselves and may take at most twice the most GPUs they ever had. Decisions come every interval.

Simplified: the exact solver of `polluxd.policy` stands for the genetic algorithm (which finds 98 to 99.5 % of the
same optimum), and placements over several nodes take whole nodes. This policy knows of no GPU types and no racks.

On rented nodes (`Scenario.cloud`), it also chooses how many of them to have, by their UTILITY (section 4.2.2, as
`polluxd.sim.policies.autoscale` implements it): the first ones, after they have booted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from polluxd.config.settings import PolicySettings
from polluxd.model import NO_PLACEMENT, Snapshot, SnapshotJob
from polluxd.policy import decide
from polluxd.policy.listing import Cache
from polluxd.sim.cluster import Cloud, Scenario
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies import daemon_view
from polluxd.sim.policies.autoscale import desired_nodes
from polluxd.sim.simulated_job import Seats, SimulatedJob

DELAY = 30.0
"""What the paper takes each move to cost, whatever it does cost [s]."""


class PolluxPaper(Policy):
    """The paper's objective and constants."""

    chooses_batch = True

    def __init__(self, scenario: Scenario) -> None:
        self._cache = Cache()
        self.nodes = None if scenario.cloud is None else scenario.cloud.least
        self._ready: dict[int, float] = {}
        """When each node that was rented last has booted."""
        self._resized_at = -math.inf
        self._seen: frozenset[int] = frozenset()
        """Jobs of the last decision."""
        self._settings = PolicySettings(
            objective="fair-share",
            power=scenario.policy.power,
            waiting_power=0.0,
            hysteresis=0.0,
            start_gpus=1,
        )

    def decide(self, view: View) -> Mapping[int, Seats]:
        if view.scenario.cloud is not None:
            view = self._rented(view, view.scenario.cloud)
        plan = decide(self._snapshot(view), cache=self._cache)
        return daemon_view.plan_seats(plan, {job.number: job for job in view.jobs})

    def _rented(self, view: View, cloud: Cloud) -> View:
        """Rent nodes or give some back; return the view of those that have booted."""
        assert self.nodes is not None
        present = frozenset(job.number for job in view.jobs)
        if self._seen.isdisjoint(present):
            # Nobody was here since: the nodes beyond the least were given back.
            self.nodes = cloud.least
        self._seen = present
        if view.now - self._resized_at >= cloud.idle_seconds:
            seen = self._snapshot(self._booted(view))
            wanted = desired_nodes(
                seen,
                least=cloud.least,
                most=cloud.most,
                template=replace(daemon_view.nodes(view)[0], schedulable=True),
            ).nodes
            self._ready |= {node: view.now + cloud.boot_seconds for node in range(self.nodes, wanted)}
            if wanted != self.nodes:
                self._resized_at = view.now
            self.nodes = wanted
        return self._booted(view)

    def _booted(self, view: View) -> View:
        assert self.nodes is not None
        absent = frozenset(
            node
            for node in range(view.scenario.nodes)
            if node >= self.nodes or self._ready.get(node, -math.inf) > view.now
        )
        capacity = tuple(0 if node in absent else size for node, size in enumerate(view.capacity))
        return replace(view, capacity=capacity, absent=absent)

    def _snapshot(self, view: View) -> Snapshot:
        return daemon_view.snapshot(view, tuple(self._job(job, view) for job in view.jobs), self._settings)

    def _job(self, job: SimulatedJob, view: View) -> SnapshotJob:
        shown = daemon_view.slurm_job(job, view)
        if any(node in view.absent for node, _ in job.seats):
            shown = replace(shown, placement=NO_PLACEMENT)
        return replace(
            shown,
            report=daemon_view.report(job, view, remaining=False, types=False),
            # The artifact penalises first starts like any other change.
            started=True,
            moves=job.restarts,
            lost_seconds=DELAY * job.restarts,
            move_cost=DELAY,
        )
