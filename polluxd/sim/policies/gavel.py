"""Gavel: max-min fair shares of time, enforced in rounds (Narayanan et al., OSDI 2020).

With one GPU type, Gavel's max-min policy gives every job the same share of time at the GPUs that it asked for: the
level is found by filling. A round lasts six minutes; each round goes to the jobs that lag most behind their share
(priority = share over time received). Batch sizes are the users'. Simplified: no space sharing, and jobs that run in
two rounds in a row stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import View
from polluxd.sim.policies.packing import seated
from polluxd.sim.training import Seats

ROUND = 360.0


class Gavel:
    """Shares of time by filling, rounds by lag."""

    chooses_batch = False
    reacts = False
    remembers = False

    def __init__(self) -> None:
        self._received: dict[int, float] = {}
        self._entitled: dict[int, float] = {}
        self._last = 0.0
        self._round = float("-inf")
        self._chosen: list[int] = []

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        since = view.now - self._last
        self._last = view.now
        asked = {n: job.submission.gpus for n, job in jobs.items()}
        level = share(list(asked.values()), sum(view.capacity))
        for number, job in jobs.items():
            self._entitled[number] = self._entitled.get(number, 0.0) + level * since
            self._received[number] = self._received.get(number, 0.0) + (since if job.seats else 0.0)
        if view.now - self._round >= ROUND:
            self._round = view.now
            self._chosen = []
        self._chosen = [n for n in self._chosen if n in jobs]
        left = sum(view.capacity) - sum(asked[n] for n in self._chosen)
        # Within a round, GPUs that come free go to those that wait; nobody is stopped.
        lag = sorted(jobs, key=lambda n: ((self._received[n] + 1.0) / (self._entitled[n] + 1.0), n))
        for number in lag:
            if number not in self._chosen and asked[number] <= left:
                self._chosen.append(number)
                left -= asked[number]
        held = {n: job.seats for n, job in jobs.items()}
        return seated({n: asked[n] for n in self._chosen}, held, view.capacity)


def share(asked: list[int], capacity: int) -> float:
    """The largest share of time that all jobs can have at once, at most 1."""
    return min(1.0, capacity / max(sum(asked), 1))
