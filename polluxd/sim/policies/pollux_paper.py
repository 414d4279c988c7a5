"""Pollux as published: its objective and constants, solved exactly.

Source: Qiao et al., OSDI 2021.

Fitness is the power mean (p = -1) of fair-share speedups over GPUs per node. A change of a job's nodes multiplies its
speedup by max(T - 30 R, 0) / (T + 30), first starts included, as in the artifact. Jobs know what they measured
themselves and may take at most twice the most GPUs they ever had. Decisions come every interval.

Simplified: the exact solver of `polluxd.policy` stands for the genetic algorithm (which finds 98 to 99.5 % of the
same optimum), and placements over several nodes take whole nodes. This policy knows of no GPU types and no racks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from polluxd.config.settings import PolicySettings
from polluxd.model import SnapshotJob
from polluxd.policy import decide
from polluxd.policy.listing import Cache
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies import daemon_view
from polluxd.sim.simulated_job import Seats, SimulatedJob

DELAY = 30.0
"""What the paper takes each move to cost, whatever it does cost [s]."""


class PolluxPaper(Policy):
    """The paper's objective and constants."""

    chooses_batch = True

    def __init__(self, power: float = -1.0) -> None:
        self._cache = Cache()
        self._settings = PolicySettings(
            objective="fair-share",
            power=power,
            waiting_power=0.0,
            remaining_work_power=0.0,
            hysteresis=0.0,
            start_gpus=1,
        )

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = tuple(self._job(job, view) for job in view.jobs)
        plan = decide(daemon_view.snapshot(view, jobs, self._settings), cache=self._cache)
        return daemon_view.plan_seats(plan, {job.number: job for job in view.jobs})

    def _job(self, job: SimulatedJob, view: View) -> SnapshotJob:
        return replace(
            daemon_view.slurm_job(job, view),
            report=daemon_view.report(job, view, remaining=False, types=False),
            # The artifact penalises first starts like any other change.
            started=True,
            moves=job.restarts,
            lost_seconds=DELAY * job.restarts,
            move_cost=DELAY,
        )
