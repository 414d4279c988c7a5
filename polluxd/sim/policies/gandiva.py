"""Gandiva: time-slicing, opportunistic growth, migration.

Source: Xiao et al., OSDI 2018.

Jobs get the GPUs that they asked for. Where they do not all fit, they take turns in slices. Where GPUs are idle and
no job waits, jobs grow to twice what they asked for, and shrink back when a job arrives. A job spread over more nodes
than it needs is migrated when that brings it together. Batch sizes are the users'.

Simplified: a slice is ten minutes, since a switch costs a restart here, where Gandiva's own suspension takes under a
second. No two jobs share a GPU. An oracle skips unprofitable growth, where Gandiva's introspection undoes it. All GPU
types are alike.
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import emptiest_first, free_gpus, seated
from polluxd.sim.policies.estimates import most_useful, remaining_seconds
from polluxd.sim.simulated_job import Seats, SimulatedJob

SLICE = 600.0


class Gandiva(Policy):
    """Round-robin slices; growth into idle GPUs."""

    def __init__(self) -> None:
        self._turn: dict[int, float] = {}
        """When each job's turn last ended, or when it came."""

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        # Whoever is within its slice stays; the others queue by when they last had GPUs, or came. A job whose slice
        # has just ended goes behind those that wait.
        self._turn = {
            n: view.now if job.seats else self._turn.get(n, job.submission.time) for n, job in jobs.items()
        }
        inside = [j for j in view.jobs if j.seats and view.now - (j.moved_at or 0.0) < SLICE]
        rest = sorted(
            (j for j in view.jobs if j not in inside), key=lambda j: (self._turn[j.number], j.number)
        )
        left, wanted = sum(view.capacity), {}
        for job in [*inside, *rest]:
            if job.submission.gpus <= left:
                wanted[job.number] = job.submission.gpus
                left -= job.submission.gpus
        if len(wanted) == len(jobs):
            left = self._grow(view, wanted, left)
        held = {n: job.seats for n, job in jobs.items()}
        found = seated(wanted, held, view.capacity)
        return self._migrate(view, found)

    def _grow(self, view: View, wanted: dict[int, int], left: int) -> int:
        size = view.scenario.gpus_per_node
        for job in sorted(view.jobs, key=lambda j: (wanted[j.number], j.number)):
            asked = job.submission.gpus
            if (
                asked <= left
                and 2 * asked <= most_useful(job, view.scenario.gpus)
                and _pays(job, asked, size)
            ):
                wanted[job.number] = 2 * asked
                left -= asked
        return left

    def _migrate(self, view: View, found: dict[int, Seats]) -> dict[int, Seats]:
        """Bring one job at a time together, where it then needs fewer nodes."""
        size = view.scenario.gpus_per_node
        for job in view.jobs:
            seats = found.get(job.number, ())
            gpus = sum(g for _, g in seats)
            if len(seats) <= -(-gpus // size) or view.now - (job.moved_at or 0.0) < SLICE:
                continue
            others = {n: s for n, s in found.items() if n != job.number}
            better = emptiest_first(free_gpus(view.capacity, others), gpus)
            if 0 < len(better) < len(seats):
                found[job.number] = better
                break
        return found


def _pays(job: SimulatedJob, asked: int, size: int) -> bool:
    """Return whether twice the GPUs shorten the remaining time enough.

    They must save more than the restart, and at least a fifth.
    """
    now, then = remaining_seconds(job, asked, size), remaining_seconds(job, 2 * asked, size)
    return then < 0.8 * now and now - then > 120.0
