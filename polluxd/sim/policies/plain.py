"""Plain Slurm: jobs keep the GPUs that they asked for to their end.

`fifo` is sched/builtin: strictly in order of submission. `backfill` is sched/backfill: a later job may start where it
does not delay the first job that waits, by the time limits. `fairshare` orders by priority/multifactor's fair-share
factor first, with the default half-life of seven days, and backfills.

Traces carry neither limits nor users. A limit is taken to be twice the true run time, and jobs of one application to
be one user's. Jobs ask for GPUs of any type.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import seated
from polluxd.sim.policies.estimates import whole_seconds
from polluxd.sim.simulated_job import Seats, SimulatedJob

HALF_LIFE = 7 * 86400.0
LIMIT = 2.0
"""Time limit over true run time: users ask for more than they need."""


class Plain(Policy):
    """Slurm without Pollux.

    `backfills`: a later job may start before the first that waits. `shares`: jobs wait in order of their user's
    usage.
    """

    reacts = True

    def __init__(self, *, backfills: bool, shares: bool = False) -> None:
        self._backfills = backfills
        self._usage: dict[str, float] | None = {} if shares else None
        self._last = 0.0
        self._limits: dict[int, float] = {}

    def decide(self, view: View) -> Mapping[int, Seats]:
        order = self._ordered(view)
        held = {job.number: job.seats for job in view.jobs if job.seats}
        wanted = {number: sum(g for _, g in seats) for number, seats in held.items()}
        left = sum(view.capacity) - sum(wanted.values())
        waiting = [job for job in view.jobs if not job.seats]
        waiting.sort(key=order)
        for position, job in enumerate(waiting):
            if job.submission.gpus > left:
                if self._backfills:
                    self._backfill(view, waiting[position:], wanted, left)
                break
            wanted[job.number] = job.submission.gpus
            left -= job.submission.gpus
        return seated(wanted, held, view.capacity)

    def _ordered(self, view: View) -> Callable[[SimulatedJob], tuple[float, int]]:
        if self._usage is None:
            return lambda job: (0.0, job.number)
        usage, since = self._usage, view.now - self._last
        self._last = view.now
        for user in usage:
            usage[user] *= 0.5 ** (since / HALF_LIFE)
        for job in view.jobs:
            usage[job.app.name] = usage.get(job.app.name, 0.0) + job.gpus * since
        return lambda job: (usage[job.app.name], job.number)

    def _limit(self, job: SimulatedJob, per_node: int) -> float:
        if job.number not in self._limits:
            self._limits[job.number] = LIMIT * whole_seconds(job, job.submission.gpus, per_node)
        return self._limits[job.number]

    def _backfill(
        self, view: View, waiting: Sequence[SimulatedJob], wanted: dict[int, int], left: int
    ) -> None:
        """Start jobs behind the first that waits, without delaying it.

        The first job has its GPUs reserved for when running jobs reach their limits. A job behind it starts if its
        limit ends before then, or if it leaves the first job its GPUs.
        """
        size = view.scenario.gpus_per_node
        ends = sorted(
            ((job.moved_at or view.now) + self._limit(job, size), job.gpus) for job in view.jobs if job.seats
        )
        first, free, shadow = waiting[0], left, float("inf")
        for end, gpus in ends:
            free += gpus
            if free >= first.submission.gpus:
                shadow = max(end, view.now)
                break
        spare = max(free - first.submission.gpus, 0)
        for job in waiting[1:]:
            gpus = job.submission.gpus
            if gpus > left:
                continue
            if view.now + self._limit(job, size) <= shadow:
                wanted[job.number] = gpus
                left -= gpus
            elif gpus <= spare:
                wanted[job.number] = gpus
                left -= gpus
                spare -= gpus
