"""A scheduling policy for `polluxctl simulate`: GPUs go to the jobs that have had the least GPU time."""

from __future__ import annotations

from collections.abc import Mapping

from polluxd.sim.engine import Policy, View
from polluxd.sim.simulated_job import Seats


class LeastAttained(Policy):
    """Each job gets the GPUs that its user asked for; whoever has used the least comes first."""

    reacts = True
    """Decide when jobs arrive and end, too, not only every minute."""

    def __init__(self) -> None:
        self._used = dict[int, float]()
        self._last = 0.0

    def decide(self, view: View) -> Mapping[int, Seats]:
        for job in view.jobs:
            held = job.gpus * (view.now - self._last)
            self._used[job.number] = self._used.get(job.number, 0.0) + held
        self._last = view.now
        free, seats = list(view.capacity), dict[int, Seats]()
        for job in sorted(view.jobs, key=lambda job: (self._used[job.number], job.number)):
            if found := _seats(free, job.submission.gpus):
                seats[job.number] = found
                for node, gpus in found:
                    free[node] -= gpus
        return seats


def _seats(free: list[int], gpus: int) -> Seats:
    """Return equal parts of as few nodes as hold so many GPUs; none where they do not fit."""
    for nodes in range(1, len(free) + 1):
        each, rest = divmod(gpus, nodes)
        fitting = [node for node, room in enumerate(free) if room >= each]
        if each and not rest and len(fitting) >= nodes:
            return tuple((node, each) for node in fitting[:nodes])
    return ()
