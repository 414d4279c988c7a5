"""Sia: an integer program over configurations (Jayaram Subramanya et al., SOSP 2023), for one GPU type.

Each job's goodput in each configuration, over its least, times the restart factor, enters with power p = -0.5; a job
left out costs 1.1. Configurations are powers of two within a node and whole nodes beyond; a job starts with one GPU and
at most doubles at a time. Agents choose batch sizes. With one GPU type the program is a multiple-choice knapsack, which
is solved exactly here by the same dynamic program as our own policy. Simplified: fits are this project's.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pollux.goodput import Goodput
from polluxd.policy.counts import solve
from polluxd.sim.applications import most_gpus
from polluxd.sim.engine import View
from polluxd.sim.policies.packing import compact
from polluxd.sim.training import Seats, Training

POWER = -0.5
UNPLACED = 1.1
DELAY = 30.0


class Sia:
    """Exact counts for Sia's objective."""

    chooses_batch = True
    reacts = False
    remembers = False

    def decide(self, view: View) -> Mapping[int, Seats]:
        size = max(view.scenario.gpus_per_node, 1)
        gpus: list[int] = []
        value: list[float] = []
        start = [0]
        for job in view.jobs:
            counts = [k for k in _configurations(size, view.scenario.gpus) if k <= _cap(job)]
            worth = _worth(job, counts, size)
            best = {0: -UNPLACED}
            age = view.now - job.submission.time
            factor = (
                max(age - DELAY * job.restarts, 0.0) / (age + DELAY) if job.started_at is not None else 1.0
            )
            for count, ratio in zip(counts, worth, strict=True):
                kept = ratio if count == job.gpus else ratio * factor
                if kept > 0:
                    best[count] = -min(kept**POWER, 10.0)
            gpus += best.keys()
            value += best.values()
            start.append(len(gpus))
        chosen, _ = solve(np.array(gpus), np.array(value), np.array(start), sum(view.capacity))
        wanted = {job.number: gpus[int(option)] for job, option in zip(view.jobs, chosen, strict=True)}
        return compact(wanted, {j.number: j.seats for j in view.jobs}, view.capacity)


def _configurations(size: int, cluster: int) -> list[int]:
    inside = [k for k in (1 << power for power in range(size.bit_length())) if k <= size]
    return sorted({*inside, size, *range(2 * size, min(cluster, 64) + 1, size)})


def _cap(job: Training) -> int:
    return min(max(2 * job.agent.explored_gpus, 1), most_gpus(job.app))


def _worth(job: Training, counts: list[int], size: int) -> list[float]:
    """Goodput over the least of the job's configurations; in proportion to GPUs before anything is measured."""
    params = job.agent.params
    if params is None:
        return [float(k) for k in counts]
    fixed = job.app.fixed_batch is not None
    goodput = Goodput(params, None if fixed else job.agent.noise, job.app.limits)
    found = goodput.optimize([-(-k // size) for k in counts], counts).goodput
    least = min((float(g) for g in found if g > 0), default=1.0)
    return [float(g) / least for g in found]
