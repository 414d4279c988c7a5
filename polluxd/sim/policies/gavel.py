"""Gavel: heterogeneity-aware max-min fair shares of time, in rounds.

Source: Narayanan et al., OSDI 2020; the max-min policy of section 4.1.

A linear program gives each job a share of time on each GPU type, so that the least normalised throughput is as large
as can be. Normalised throughput is a job's throughput over its types, against what equal shares of every type would
give it. Time that max-min leaves over goes where it adds most. With one type every job gets the same share.

A round lasts six minutes. GPUs of a type go to the jobs that lag most behind their share of it (priority = share over
time received). Batch sizes are the users'; throughputs are true ones, as Gavel's profiler would have found them.

Simplified: jobs do not share GPUs (no space sharing), and jobs that run in two rounds in a row stay where they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.errors import ConfigError
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import only, seated
from polluxd.sim.policies.estimates import steps_per_second
from polluxd.sim.simulated_job import Seats, SimulatedJob

ROUND = 360.0
LEFT_OVER = 1e-3
"""What throughput beyond the least is worth against it: it settles what max-min leaves open."""

Floats = NDArray[np.float64]


class Gavel(Policy):
    """Shares of time by linear program, rounds by lag."""

    def __init__(self) -> None:
        self._received: dict[tuple[int, str], float] = {}
        self._entitled: dict[tuple[int, str], float] = {}
        self._last = 0.0
        self._round = float("-inf")
        self._chosen: dict[int, str] = {}
        self._shares: tuple[object, Floats] = (None, np.zeros((0, 0)))

    def decide(self, view: View) -> Mapping[int, Seats]:
        jobs = {job.number: job for job in view.jobs}
        types = sorted(set(view.scenario.types))
        _check(view, types)
        left = {kind: sum(only(view, kind)) for kind in types}
        since = view.now - self._last
        self._last = view.now
        shares = self._share_out(list(jobs.values()), types, left, view)
        for row, number in enumerate(jobs):
            for column, kind in enumerate(types):
                key = (number, kind)
                runs = bool(jobs[number].seats) and self._chosen.get(number) == kind
                self._entitled[key] = self._entitled.get(key, 0.0) + float(shares[row, column]) * since
                self._received[key] = self._received.get(key, 0.0) + (since if runs else 0.0)
        if view.now - self._round >= ROUND:
            self._round = view.now
            self._chosen = {}
        self._chosen = {n: kind for n, kind in self._chosen.items() if n in jobs}
        for number, kind in self._chosen.items():
            left[kind] -= jobs[number].submission.gpus
        # Within a round, GPUs that come free go to those that wait; nobody is stopped.
        entitled = [key for key in self._entitled if key[0] in jobs]
        for number, kind in sorted(
            entitled, key=lambda k: ((self._received[k] + 1.0) / (self._entitled[k] + 1.0), k)
        ):
            wants = self._entitled[number, kind] > 0 or len(types) == 1
            if number not in self._chosen and wants and jobs[number].submission.gpus <= left[kind]:
                self._chosen[number] = kind
                left[kind] -= jobs[number].submission.gpus
        held = {n: job.seats for n, job in jobs.items()}
        found: dict[int, Seats] = {}
        for kind in types:
            wanted = {n: jobs[n].submission.gpus for n, chosen in self._chosen.items() if chosen == kind}
            found |= seated(wanted, held, only(view, kind))
        return found

    def _share_out(
        self, jobs: Sequence[SimulatedJob], types: Sequence[str], room: Mapping[str, int], view: View
    ) -> Floats:
        """Return [J, types]: shares of time.

        They are computed again only where jobs or nodes have changed.
        """
        asked = [job.submission.gpus for job in jobs]
        known = (tuple(job.number for job in jobs), tuple(room.values()))
        if self._shares[0] != known:
            if len(types) == 1:
                found = np.full((len(jobs), 1), share(asked, room[types[0]]))
            else:
                speed = np.array([[_speed(job, kind, view) for kind in types] for job in jobs])
                found = shares(asked, speed, [room[kind] for kind in types])
            self._shares = known, found
        return self._shares[1]


def _check(view: View, types: Sequence[str]) -> None:
    """Refuse a job that asks for more GPUs than any one type has.

    Such a job would never start.
    """
    sized = list(zip(view.scenario.types, view.scenario.sizes, strict=True))
    most = max(sum(size for kind, size in sized if kind == wanted) for wanted in types)
    for job in view.jobs:
        if job.submission.gpus > most:
            raise ConfigError(
                f"job {job.submission.name} asks for {job.submission.gpus} GPUs, and no GPU type has more than {most}; "
                "gavel keeps a job to one type: lower what it asks for, or simulate more nodes of a type"
            )


def _speed(job: SimulatedJob, kind: str, view: View) -> float:
    """Return the true optimizer steps per second on that GPU type.

    GPUs and batch size are as the user asked.
    """
    size = max(only(view, kind), default=0) or view.scenario.gpus_per_node
    return steps_per_second(job.on[kind], job.submission.batch_size, job.submission.gpus, size)


def share(asked: Sequence[int], capacity: int) -> float:
    """Return the largest share of time that all jobs can have at once.

    It holds for one GPU type and is at most 1.
    """
    return min(1.0, capacity / max(sum(asked), 1))


def shares(asked: Sequence[int], speed: Floats, capacity: Sequence[int]) -> Floats:
    """Return [J, T]: shares of time on T types, max-min fair.

    The least normalised throughput is as large as can be. `speed` [J, T] holds the throughputs.
    """
    from scipy.optimize import linprog  # noqa: PLC0415 - half a second that no other policy should pay

    jobs, types = speed.shape
    room = np.asarray(capacity, dtype=np.float64)
    gpus = np.asarray(asked, dtype=np.float64)
    fits = gpus[:, None] <= room[None, :]
    equal = np.where(fits, speed, 0.0) @ (room / max(room.sum(), 1.0))
    ratio = np.where(fits, speed, 0.0) / np.where(equal > 0, equal, 1.0)[:, None]
    able = equal > 0
    # Unknowns: the shares, job by job, then the least throughput of those that fit anywhere.
    least = np.zeros((jobs, jobs * types + 1))
    whole = np.zeros((jobs, jobs * types + 1))
    for j in range(jobs):
        least[j, j * types : (j + 1) * types] = -ratio[j]
        least[j, -1] = 1.0 if able[j] else 0.0
        whole[j, j * types : (j + 1) * types] = 1.0
    held = np.zeros((types, jobs * types + 1))
    for t in range(types):
        held[t, t : jobs * types : types] = gpus
    aim = np.append(-LEFT_OVER * ratio.ravel() / max(jobs, 1), -1.0)
    bounds = [(0.0, 1.0 if fits[j, t] else 0.0) for j in range(jobs) for t in range(types)]
    found = linprog(
        aim,
        A_ub=np.vstack([least, whole, held]),
        b_ub=np.concatenate([np.zeros(jobs), np.ones(jobs), room]),
        bounds=[*bounds, (0.0, None)],
        method="highs",
    )
    return np.asarray(found.x[:-1], dtype=np.float64).reshape(jobs, types)
