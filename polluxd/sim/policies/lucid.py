"""Lucid: the job with the least work first, on as few nodes as hold it, without preemption.

Source: Hu et al., ASPLOS 2023, and its artifact.

Jobs wait in order of their GPUs times their duration. Each starts where it fits on as few nodes as can hold it; a job
that does not fit does not hold up those behind it.

Simplified: an oracle knows durations, where Lucid learns them from earlier jobs, and no GPUs are set aside for
profiling. Jobs are not packed in pairs: Lucid pairs them by their measured utilisation of a GPU, which the profiles
here do not have. All GPU types are alike.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

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
            seats = _consolidated(free, view.capacity, job.submission.gpus)
            if seats:
                found[job.number] = seats
                for node, gpus in seats:
                    free[node] -= gpus
        return found


def _consolidated(free: Sequence[int], capacity: Sequence[int], gpus: int) -> Seats:
    """Return seats on as few nodes as can hold so many GPUs; of single nodes with room, on the fullest. Else none."""
    fitting = [node for node, room in enumerate(free) if room >= gpus]
    if fitting:
        return ((min(fitting, key=free.__getitem__), gpus),)
    sizes = list(accumulate(sorted(capacity, reverse=True)))
    fewest = bisect_left(sizes, gpus) + 1
    seats, rest = [], gpus
    for node in sorted(range(len(free)), key=free.__getitem__, reverse=True)[:fewest]:
        taken = min(free[node], rest)
        seats.append((node, taken))
        rest -= taken
    return tuple(seats) if rest == 0 else ()
