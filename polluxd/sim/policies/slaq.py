"""SLAQ: GPUs go where they reduce loss most in the coming interval.

Source: Zhang et al., SoCC 2017.

Loss is normalised per job, as in the paper, and predicted from the past. Here it falls as 1 / (1 + c p) in the share
p of training done, the sublinear family that SLAQ fits, with one c for all (traces carry no losses). Each job gets
one GPU while there are any. Further GPUs go one by one to the job with the largest marginal loss reduction. Batch
sizes are the users'; step times are true. All GPU types are alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import seated
from polluxd.sim.policies.estimates import most_useful, whole_seconds
from polluxd.sim.simulated_job import Seats, SimulatedJob

STEEPNESS = 20.0
HORIZON = 300.0
"""Seconds ahead for which the reduction is predicted."""
PATIENCE = 300.0
"""Seconds for which a job keeps its GPUs: a change costs a restart."""


class Slaq(Policy):
    """Greedy by marginal loss reduction."""

    def decide(self, view: View) -> Mapping[int, Seats]:
        size, left = view.scenario.gpus_per_node, sum(view.capacity)
        counts: dict[int, int] = {}
        gains: list[tuple[float, int]] = []
        settled = [j for j in view.jobs if j.seats and view.now - (j.moved_at or 0.0) < PATIENCE]
        for job in settled:
            counts[job.number] = job.gpus
            left -= job.gpus
        free = [j for j in view.jobs if j.number not in counts]
        for order, job in sorted(enumerate(free), key=lambda e: -_reduction(e[1], 1, size)):
            counts[job.number] = 1 if left > 0 else 0
            left -= counts[job.number]
            if counts[job.number]:
                self._push(gains, order, job, 1, view)
        while left > 0 and gains:
            gain, order = heapq.heappop(gains)
            if gain >= 0:
                break
            job = free[order]
            counts[job.number] += 1
            left -= 1
            self._push(gains, order, job, counts[job.number], view)
        return seated(counts, {j.number: j.seats for j in view.jobs}, view.capacity)

    @staticmethod
    def _push(gains: list[tuple[float, int]], order: int, job: SimulatedJob, count: int, view: View) -> None:
        size = view.scenario.gpus_per_node
        if count + 1 <= most_useful(job, view.scenario.gpus):
            gain = _reduction(job, count + 1, size) - _reduction(job, count, size)
            heapq.heappush(gains, (-gain, order))


def _reduction(job: SimulatedJob, gpus: int, size: int) -> float:
    """Return the loss that training on so many GPUs removes in the horizon.

    Loss begins at 1.
    """
    done = job.progress / job.length
    then = min(done + HORIZON / whole_seconds(job, gpus, size), 1.0)
    return 1.0 / (1.0 + STEEPNESS * done) - 1.0 / (1.0 + STEEPNESS * then)
