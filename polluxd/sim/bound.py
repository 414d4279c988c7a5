"""A lower bound on the mean completion time of any policy.

Job j takes at least W_j GPU-seconds, and at least D_j seconds: its best progress per GPU-second, and per second, in
every epoch. Every schedule on G GPUs keeps three bounds on the sum of completion times C_j:

    sum_j (r_j + D_j)            no job is faster than alone on the GPUs that suit it best (r_j: its submission)
    SRPT                         G GPUs are no better than one machine that does G GPU-seconds of any job per second;
                                 on it, serving the job of shortest remaining work first is optimal (Schrage, 1968)
    sum_j (B_j + D_j / 2)        B_j: mean busy time, at which the job's work is done on average. A job that works at
                                 its largest rate at most ends at least D_j / 2 later. On the one machine, the sum of
                                 B_j is least where the smallest W_j goes first (Goemans, 1997)

The largest of the three is the bound. It assumes what the simulator offers: packed placements, batch sizes of a fine
grid, all GPUs alike, no cost of moves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.applications import Application
from polluxd.sim.cluster import Scenario
from polluxd.sim.measures import Alone
from polluxd.sim.workload import Submission

Floats = NDArray[np.float64]

SIZES = 200
"""Batch sizes tried: two neighbours differ by some 2 %."""


def least_mean(
    submissions: Sequence[Submission], applications: Mapping[str, Application], scenario: Scenario
) -> float:
    """Return seconds that no policy's mean completion time is below."""
    alone: dict[str, tuple[float, float]] = {}
    for name in {job.application for job in submissions}:
        found = Alone(applications[name], scenario.gpus_per_node, SIZES)
        alone[name] = found.least(scenario.gpus)
    released = np.array([job.time for job in submissions])
    least = np.array([alone[job.application] for job in submissions]) * np.array(
        [[job.work] for job in submissions]
    )
    return least_mean_of(released, least[:, 0] / scenario.gpus, least[:, 1])


def least_mean_of(released: Floats, work: Floats, alone: Floats) -> float:
    """Return the bound for jobs given by three times [J].

    `work`: seconds on the whole cluster. `alone`: seconds that the job takes at least.
    """
    ended, _ = _one_machine(released, work, lambda job, left: left)
    _, busy = _one_machine(released, work, lambda job, left: float(work[job]))
    bounds = (alone, ended - released, busy + alone / 2 - released)
    return float(max(np.mean(bound) for bound in bounds))


def _one_machine(
    released: Floats, work: Floats, rank: Callable[[int, float], float]
) -> tuple[Floats, Floats]:
    """Return completion times and mean busy times [J] on one machine.

    At every moment it serves the present job of lowest rank, given the job's number and the work that it has left.
    """
    left, ended, busy = work.astype(np.float64), np.zeros(work.size), np.zeros(work.size)
    order = np.argsort(released, kind="stable").tolist()
    waiting: list[tuple[float, int]] = []
    now, place = 0.0, 0
    while waiting or place < len(order):
        if not waiting:
            now = max(now, float(released[order[place]]))
        while place < len(order) and released[order[place]] <= now:
            job = order[place]
            heapq.heappush(waiting, (rank(job, float(left[job])), job))
            place += 1
        _, job = heapq.heappop(waiting)
        until = now + float(left[job])
        if place < len(order):
            until = min(until, float(released[order[place]]))
        spent = until - now
        busy[job] += spent * (now + until) / 2 / work[job]
        left[job] -= spent
        now = until
        if left[job] <= 1e-9 * work[job]:
            ended[job] = now
        else:
            heapq.heappush(waiting, (rank(job, float(left[job])), job))
    return ended, busy
