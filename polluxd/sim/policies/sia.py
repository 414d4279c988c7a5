"""Sia: an integer program over configurations of GPU type and count.

Source: Jayaram Subramanya et al., SOSP 2023.

Each job's goodput in each configuration, over its least, times the restart factor, enters with power p = -0.5. A job
left out costs 1.1. Configurations are powers of two within a node and whole nodes of one type beyond. A job begins at
one GPU and at most doubles at a time. Agents choose batch sizes.

On a type where a job has not run, its goodput is what it knows of another type times the ratio of their true speeds
on one GPU. This is Sia's bootstrap: a profile on one GPU of every type, here at no cost. With one type the program is
a multiple-choice knapsack, which the dynamic program of our own policy solves exactly; with several, HiGHS solves it.

On one type, the batch size is at most the user's own, as in Sia's policy for such clusters (`max_batch_size` of its
speedup functions); else jobs grow to GPUs that Sia would not give them.

Simplified: fits are this project's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from pollux.goodput import Goodput
from polluxd.policy.counts import solve
from polluxd.sim.applications import most_gpus
from polluxd.sim.engine import Policy, View
from polluxd.sim.policies.baseline_packing import compact, only
from polluxd.sim.simulated_job import Seats, SimulatedJob

POWER = -0.5
UNPLACED = 1.1
DELAY = 30.0


class Option(NamedTuple):
    """One configuration of one job; no GPUs: it is left out."""

    kind: str
    gpus: int
    value: float


class Sia(Policy):
    """Exact counts for Sia's objective."""

    chooses_batch = True

    def decide(self, view: View) -> Mapping[int, Seats]:
        types = sorted(set(view.scenario.types))
        rooms = {kind: only(view, kind) for kind in types}
        options = [_options(job, view, rooms) for job in view.jobs]
        capacity = {kind: sum(room) for kind, room in rooms.items()}
        chosen = _best(options, capacity[types[0]]) if len(types) == 1 else program(options, capacity)
        found: dict[int, Seats] = {}
        for kind in types:
            wanted = {
                job.number: option.gpus
                for job, option in zip(view.jobs, chosen, strict=True)
                if option.kind == kind and option.gpus
            }
            found |= compact(wanted, {j.number: j.seats for j in view.jobs}, rooms[kind])
        return found


def _options(job: SimulatedJob, view: View, rooms: Mapping[str, Sequence[int]]) -> list[Option]:
    listed: list[tuple[str, int, float]] = []
    for kind, room in rooms.items():
        size = max(room, default=0)
        counts = [k for k in _configurations(size, sum(room)) if k <= _cap(job)] if size else []
        most = job.submission.batch_size if len(rooms) == 1 else job.app.limits.maximum
        listed += zip([kind] * len(counts), counts, _goodput(job, kind, counts, size, most), strict=True)
    least = min((g for _, _, g in listed if g > 0), default=1.0)
    age = view.now - job.submission.time
    factor = max(age - DELAY * job.restarts, 0.0) / (age + DELAY) if job.started_at is not None else 1.0
    here = view.scenario.types[job.seats[0][0]] if job.seats else None
    found = [Option(next(iter(rooms)), 0, -UNPLACED)]
    for kind, count, goodput in listed:
        kept = goodput / least * (1.0 if (kind, count) == (here, job.gpus) else factor)
        if kept > 0:
            found.append(Option(kind, count, -min(kept**POWER, 10.0)))
    return found


def _best(options: Sequence[Sequence[Option]], capacity: int) -> list[Option]:
    flat = [option for own in options for option in own]
    start = np.cumsum([0, *(len(own) for own in options)])
    gpus, value = np.array([o.gpus for o in flat]), np.array([o.value for o in flat])
    chosen, _ = solve(gpus, value, start, capacity)
    return [flat[int(option)] for option in chosen]


def program(options: Sequence[Sequence[Option]], capacity: Mapping[str, int]) -> list[Option]:
    """Choose one option per job, of largest total value.

    The choice keeps within the GPUs of every type.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # noqa: PLC0415 - see gavel
    from scipy.sparse import csr_array  # noqa: PLC0415

    flat = [option for own in options for option in own]
    rows = [j for j, own in enumerate(options) for _ in own]
    one = csr_array((np.ones(len(flat)), (rows, range(len(flat)))), shape=(len(options), len(flat)))
    kinds = list(capacity)
    room = csr_array(
        ([o.gpus for o in flat], ([kinds.index(o.kind) for o in flat], range(len(flat)))),
        shape=(len(kinds), len(flat)),
        dtype=np.float64,
    )
    found = milp(
        -np.array([option.value for option in flat]),
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(room, 0, list(capacity.values()))],
        options={"mip_rel_gap": 1e-4, "node_limit": 2000},
    )
    if found.x is None:
        # The node limit, before any plan was found: everyone keeps to the first option, which is to have nothing.
        return [own[0] for own in options]
    picked = np.flatnonzero(np.asarray(found.x) > 0.5)
    return [flat[int(option)] for option in picked]


def _configurations(size: int, cluster: int) -> list[int]:
    inside = [k for k in (1 << power for power in range(size.bit_length())) if k <= size]
    return sorted({*inside, size, *range(2 * size, min(cluster, 64) + 1, size)})


def _cap(job: SimulatedJob) -> int:
    return min(max(2 * job.agent.explored_gpus, 1), most_gpus(job.app))


def _goodput(job: SimulatedJob, kind: str, counts: Sequence[int], size: int, most: int) -> list[float]:
    """Return the goodput on so many GPUs of a type, at a batch size of at most `most`.

    Before anything is measured, it is in proportion to GPUs and speed.
    """
    if not counts:
        return []
    params, ratio = job.agent.known_on(kind), 1.0
    if params is None:
        params = job.agent.params
        known = job.agent.gpu_type if params is not None else next(iter(job.on))
        ratio = _pass(job, known) / _pass(job, kind) if known in job.on else 1.0
    if params is None:
        return [ratio * k for k in counts]
    fixed = job.app.fixed_batch is not None
    limits = replace(job.app.limits, maximum=max(most, job.app.limits.initial))
    goodput = Goodput(params, None if fixed else job.agent.noise, limits)
    found = goodput.optimize([-(-k // size) for k in counts], counts).goodput
    return [ratio * float(g) for g in found]


def _pass(job: SimulatedJob, kind: str) -> float:
    """True seconds of a pass on one GPU of a type."""
    limits = job.app.limits
    m = min(max(limits.initial, limits.local_min), limits.local_max)
    return job.on[kind].times((1,), m)[0]
