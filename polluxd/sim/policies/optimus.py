"""Optimus: GPUs go where they shorten the remaining time most.

Source: Peng et al., EuroSys 2018, with an oracle.

As the Pollux artifact runs it, each job gets one GPU. Then GPUs are handed out one by one to the job whose remaining
time falls most. The oracle knows each job's true remaining iterations and step times, which is more than Optimus's
own convergence fits know. Batch sizes are the users'. Jobs whose count changed are placed again, smallest first. All
GPU types are alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from polluxd.sim.applications import Application, placement_of, split_batch
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import emptiest_first, free_gpus, still_fits
from polluxd.sim.simulated_job import Seats, SimulatedJob


class Optimus(Policy):
    """Greedy by marginal gain in remaining time."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, int, int], float] = {}

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs, per_node = view.jobs, view.scenario.gpus_per_node
        left = sum(view.capacity)
        counts = {}
        gains: list[tuple[float, int, int]] = []
        remaining = {job.number: _remaining(job) for job in jobs}
        for order, job in enumerate(jobs):
            counts[job.number] = 1 if left >= 1 else 0
            left -= counts[job.number]
            if counts[job.number] and left >= 1:
                self._push(gains, order, job, counts[job.number], remaining[job.number], per_node)
        while left > 0 and gains and gains[0][0] < 0:
            _, order, _ = heapq.heappop(gains)
            job = jobs[order]
            counts[job.number] += 1
            self._push(gains, order, job, counts[job.number], remaining[job.number], per_node)
            left -= 1
        held = {
            j.number: j.seats
            for j in jobs
            if j.gpus == counts[j.number] and still_fits(j.seats, view.capacity)
        }
        free = free_gpus(view.capacity, held)
        for job in sorted(jobs, key=lambda j: counts[j.number]):
            if counts[job.number] and job.number not in held:
                held[job.number] = emptiest_first(free, counts[job.number])
        return held

    def _push(
        self,
        gains: list[tuple[float, int, int]],
        order: int,
        job: SimulatedJob,
        count: int,
        remaining: float,
        per_node: int,
    ) -> None:
        most = job.submission.batch_size // job.app.limits.local_min
        if job.app.most_gpus is not None:
            most = min(most, job.app.most_gpus)
        if count + 1 <= most:
            size = job.submission.batch_size
            saved = self._time(job.app, size, count, per_node) - self._time(
                job.app, size, count + 1, per_node
            )
            heapq.heappush(gains, (-saved * remaining, order, count))

    def _time(self, app: Application, batch_size: int, gpus: int, per_node: int) -> float:
        """True seconds of one optimizer step on so many packed GPUs."""
        key = (app.name, batch_size, gpus, per_node)
        if key not in self._times:
            m, s = split_batch(batch_size, gpus, app.limits)
            if gpus == 1 and s == 0:
                # The artifact lets one GPU always accumulate here, at M0 too.
                m, s = -(-batch_size // 2), 1
            step, sync = app.times(placement_of(gpus, per_node), m)
            self._times[key] = step + s * (step - sync)
        return self._times[key]


def _remaining(job: SimulatedJob) -> float:
    """True optimizer steps to go, by whole epochs."""
    last = job.app.epochs - 1
    if last <= job.epoch:
        return 1.0
    size = job.submission.batch_size
    return job.app.iterations(size, last) - job.app.iterations(size, job.epoch)
