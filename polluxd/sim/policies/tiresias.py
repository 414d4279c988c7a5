"""Tiresias: least attained service in two queues.

Source: Gu et al., NSDI 2019, as the Pollux artifact runs it.

Jobs keep the GPUs and the batch size that their users asked for. The first queue holds jobs with less than 16
GPU-hours of service, the second queue the others. Within a queue, jobs run first come first served. All jobs that fit
run, in that order; a job that is overtaken is preempted whole. All GPU types are alike.

Left out, as in the artifact: promotion of starved jobs (its knob is 0), and the choice by profile which jobs to
consolidate (all are packed onto the emptiest nodes).
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import emptiest_first, free_gpus, still_fits
from polluxd.sim.simulated_job import Seats

THRESHOLD = 16 * 3600.0
"""GPU-seconds of service that move a job to the second queue."""


class Tiresias(Policy):
    """2D-LAS: time served times GPUs orders the jobs."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._second: list[int] = []
        self._served: dict[int, float] = {}
        self._running: set[int] = set()
        self._last = 0.0

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        gone = view.now - self._last
        self._last = view.now
        self._first = [n for n in self._first if n in jobs]
        self._second = [n for n in self._second if n in jobs]
        known = {*self._first, *self._second}
        self._first += [n for n in jobs if n not in known]
        for number, job in jobs.items():
            if number in self._running:
                self._served[number] = self._served.get(number, 0.0) + gone
                if number in self._first and self._served[number] * job.submission.gpus >= THRESHOLD:
                    self._first.remove(number)
                    self._second.append(number)
        left = sum(view.capacity)
        chosen: list[int] = []
        for number in [*self._first, *self._second]:
            if jobs[number].submission.gpus <= left:
                chosen.append(number)
                left -= jobs[number].submission.gpus
        self._running = set(chosen)
        held = {n: jobs[n].seats for n in chosen if still_fits(jobs[n].seats, view.capacity)}
        free = free_gpus(view.capacity, held)
        for number in chosen:
            if number not in held:
                held[number] = emptiest_first(free, jobs[number].submission.gpus)
        return held
