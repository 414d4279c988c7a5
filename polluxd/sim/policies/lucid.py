"""Lucid: the job with the least work first, on as few nodes as hold it, without preemption.

Source: Hu et al., ASPLOS 2023, and its artifact.

Jobs wait in order of their GPUs times their duration. Each starts where it fits on as few nodes as can hold it; a job
that does not fit does not hold up those behind it.

Simplified: an oracle knows durations, where Lucid learns them from earlier jobs, and no GPUs are set aside for
profiling. Jobs are not packed in pairs: Lucid pairs them by their measured utilisation of a GPU, which the profiles
here do not have. All GPU types are alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import free_gpus, still_fits
from polluxd.sim.policies.estimates import whole_seconds
from polluxd.sim.simulated_job import Seats, SimulatedJob


class Lucid(Policy):
    """Least work first, consolidated."""

    def decide(self, view: View) -> Mapping[int, Seats]:
        size = view.scenario.gpus_per_node
        found = {job.number: job.seats for job in view.jobs if still_fits(job.seats, view.capacity)}
        free = free_gpus(view.capacity, found)

        def work(job: SimulatedJob) -> tuple[float, int]:
            return job.submission.gpus * whole_seconds(job, job.submission.gpus, size), job.number

        for job in sorted((job for job in view.jobs if job.number not in found), key=work):
            seats = _consolidated(free, job.submission.gpus, size)
            if seats:
                found[job.number] = seats
                for node, gpus in seats:
                    free[node] -= gpus
        return found


def _consolidated(free: Sequence[int], gpus: int, size: int) -> Seats:
    """Return seats on whole nodes, and on the fullest node that has room for what is less than a node."""
    seats: dict[int, int] = {}
    for wanted in [size] * (gpus // size) + [gpus % size] * (gpus % size > 0):
        roomy = [node for node in range(len(free)) if free[node] >= wanted and node not in seats]
        if not roomy:
            return ()
        seats[min(roomy, key=free.__getitem__)] = wanted
    return tuple(seats.items())
