"""AntMan: guaranteed jobs, and opportunistic jobs in their idle cycles.

Source: Xiao et al., OSDI 2020.

Guaranteed jobs get the GPUs that they asked for, first come first served. A job that finds too few free GPUs runs at
once as an opportunistic job, each on GPUs of guaranteed jobs. It uses the cycles that the guaranteed job (the
resident) leaves idle while it waits for its gradients: the sync share of the resident's step, and never less than a
tenth. The resident is not slowed, as AntMan's kernel-level scheduling intends. When GPUs come free, the opportunistic
job that waits longest becomes guaranteed (a restart).

Simplified: one tenant has the whole cluster as its quota, memory always fits, each GPU takes one opportunistic job,
and all GPU types are alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import emptiest_first, seated, still_fits
from polluxd.sim.simulated_job import Seats, SimulatedJob

LEAST_IDLE = 0.1
"""Share of a GPU's cycles that any training leaves to others."""


class AntMan(Policy):
    """First come first served, with the overflow in idle cycles."""

    def __init__(self) -> None:
        self.borrowers: Mapping[int, float] = {}
        self._guaranteed: set[int] = set()

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        self._guaranteed = {
            n for n in self._guaranteed if n in jobs and still_fits(jobs[n].seats, view.capacity)
        }
        wanted = {n: jobs[n].submission.gpus for n in sorted(self._guaranteed)}
        left = sum(view.capacity) - sum(wanted.values())
        for number, job in jobs.items():
            if number not in wanted and job.submission.gpus <= left:
                wanted[number] = job.submission.gpus
                left -= job.submission.gpus
        held = {n: jobs[n].seats for n in self._guaranteed}
        found = seated(wanted, held, view.capacity)
        self._guaranteed = set(found)
        return {**found, **self._borrow(view, found, jobs)}

    def _borrow(
        self, view: View, found: Mapping[int, Seats], jobs: Mapping[int, SimulatedJob]
    ) -> dict[int, Seats]:
        """Seats and speeds of the opportunistic jobs."""
        idle = [0.0 if room else 1.0 for room in view.capacity]
        room = [0] * len(view.capacity)
        for number, seats in found.items():
            share = _idle_share(jobs[number], seats)
            for node, gpus in seats:
                # The busiest resident of a node sets the pace there.
                idle[node] = share if room[node] == 0 else min(idle[node], share)
                room[node] += gpus
        borrowed: dict[int, Seats] = {}
        speeds: dict[int, float] = {}
        rest = [job for n, job in jobs.items() if n not in found]
        for job in [*(j for j in rest if j.seats), *(j for j in rest if not j.seats)]:
            seats = job.seats if still_fits(job.seats, room) else emptiest_first(room, job.submission.gpus)
            if seats and seats == job.seats:
                for node, gpus in seats:
                    room[node] -= gpus
            if seats:
                borrowed[job.number] = seats
                speeds[job.number] = min(idle[node] for node, _ in seats)
        self.borrowers = speeds
        return borrowed


def _idle_share(job: SimulatedJob, seats: Seats) -> float:
    step, sync = job.app.times(
        tuple(gpus for _, gpus in seats),
        max(job.app.limits.local_min, job.submission.batch_size // job.submission.gpus),
    )
    return min(max(sync / step, LEAST_IDLE), 0.9)
