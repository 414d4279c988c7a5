"""Shockwave: a plan of rounds that trades fairness against efficiency and the end of the last job.

Source: Zheng et al., NSDI 2023; rounds, bases of the logarithm, lambda and k as in its artifact.

A window of 20 rounds of 2 minutes is planned at once. The plan maximises the sum over jobs of the logarithm of the
progress that they will have, each weighted by rho to the power lambda, less k times the longest time that a job then
has left. Jobs that are treated worst (largest rho, as in `themis`) get their rounds first. The plan is made again
when a job comes or goes, and at the window's end. Jobs keep the GPUs and the batch size that their users asked for.

Simplified: a greedy choice, round by round, stands for the mixed-integer program (each job's worth is concave in its
rounds). An oracle predicts times, where Shockwave predicts how a job's batch size will change: here it does not. All
GPU types are alike.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import seated
from polluxd.sim.policies.estimates import finish_time_fairness, remaining_seconds, whole_seconds
from polluxd.sim.simulated_job import Seats

ROUND, WINDOW = 120.0, 20
"""Seconds of a round; rounds of a window."""
LAMBDA, K = 12.0, 1e-3
BASES = np.linspace(0.0, 1.0, 6)
"""Progress between which the logarithm is taken as linear; that of no progress is the logarithm of 1e-6."""
LOGARITHMS = np.log(np.maximum(BASES, 1e-6))


class Shockwave(Policy):
    """Rounds by the Nash social welfare of a window."""

    def __init__(self) -> None:
        self._rounds: dict[int, int] = {}
        """Rounds of the window that each job still gets, the worst treated job first."""
        self._known: set[int] = set()
        self._next_round = self._window_end = float("-inf")
        self._chosen: dict[int, int] = {}

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        if view.now >= self._next_round:
            self._next_round = view.now + ROUND
            if jobs.keys() != self._known or view.now >= self._window_end:
                self._plan(view)
                self._known, self._window_end = set(jobs), view.now + ROUND * WINDOW
            self._chosen, left = {}, sum(view.capacity)
            # GPUs that no planned round can use go to the others, in the same order.
            for number in sorted(self._rounds, key=lambda n: self._rounds[n] == 0):
                gpus = jobs[number].submission.gpus
                if gpus <= left:
                    self._chosen[number] = gpus
                    self._rounds[number] = max(self._rounds[number] - 1, 0)
                    left -= gpus
        chosen = {n: gpus for n, gpus in self._chosen.items() if n in jobs}
        return seated(chosen, {n: job.seats for n, job in jobs.items()}, view.capacity)

    def _plan(self, view: View) -> None:
        size, jobs = view.scenario.gpus_per_node, view.jobs
        rho = np.array([finish_time_fairness(job, view) for job in jobs])
        gpus = np.array([job.submission.gpus for job in jobs])
        whole = np.array([whole_seconds(job, job.submission.gpus, size) for job in jobs])
        left = np.array([remaining_seconds(job, job.submission.gpus, size) for job in jobs])
        rounds = planned(rho, gpus, whole, left, sum(view.capacity))
        self._rounds = {jobs[j].number: int(rounds[j]) for j in np.argsort(-rho, kind="stable")}


def planned(
    rho: NDArray[np.float64],
    gpus: NDArray[np.int64],
    whole: NDArray[np.float64],
    left: NDArray[np.float64],
    capacity: int,
) -> NDArray[np.int64]:
    """Return [J]: the rounds of the window that each of J jobs gets on `capacity` GPUs.

    `rho` [J] is finish-time fairness, `gpus` [J] what each job asks for, `whole` and `left` [J] the seconds of its
    whole training and of its remainder.
    """
    rounds, free = np.zeros(len(rho), np.int64), capacity * WINDOW
    scale = rho**LAMBDA / (len(rho) * WINDOW)
    while True:
        seconds = left - rounds * ROUND
        done = np.clip(1.0 - seconds / whole, 0.0, 1.0)
        then = np.clip(1.0 - (seconds - ROUND) / whole, 0.0, 1.0)
        worth = scale * (np.interp(then, BASES, LOGARITHMS) - np.interp(done, BASES, LOGARITHMS))
        longest = np.argmax(seconds)
        worth[longest] += K * min(ROUND, seconds[longest])
        open_ = (rounds < WINDOW) & (seconds > 0) & (gpus <= min(free, capacity))
        if not open_.any():
            return rounds
        best = np.argmax(np.where(open_, worth / gpus, -np.inf))
        rounds[best] += 1
        free -= int(gpus[best])
