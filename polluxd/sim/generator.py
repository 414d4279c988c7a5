"""Synthetic traces with stated distributions.

Arrivals: a Poisson process whose rate follows the working day, 1 - 0.6 cos(2 pi (h - 2) / 24) at hour h: lowest at
two at night, highest at two in the afternoon, beginning at eight. Applications: each is drawn with a weight falling
with the square root of its GPU time, since small trainings outnumber large ones in every published trace. GPUs: 1, 2,
4, 8 or 16 with probabilities .5, .15, .2, .1 and .05 (after Philly), as far as the application can use them; the batch
size scales with them. Length: log-normal around `length` times the application's own, sigma 0.5. Sweeps: one
arrival in ten is a hyper-parameter search of `sweep` like jobs of one GPU at one moment, where `sweep` is above one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
from pydantic import ConfigDict, Field, FiniteFloat, PositiveInt
from pydantic.dataclasses import dataclass

from polluxd.config.value_types import Share
from polluxd.sim.applications import Application, most_gpus
from polluxd.sim.workload import Submission

GPUS = {1: 0.5, 2: 0.15, 4: 0.2, 8: 0.1, 16: 0.05}
DEPTH = 0.6
SWEEPS = 0.1
BEGIN = 8.0
"""Hour of the day at which the trace begins."""


@dataclass(
    frozen=True,
    slots=True,
    config=ConfigDict(extra="forbid", use_attribute_docstrings=True),
)
class Trace:
    """Which jobs come: how a trace is generated, or how much of a file is read."""

    hours: Annotated[FiniteFloat, Field(gt=0)] = 8.0
    """Hours over which generated jobs arrive."""
    sweep: PositiveInt = 1
    """Jobs of each hyper-parameter search; one arrival in ten is a search."""
    length: Annotated[FiniteFloat, Field(gt=0)] = 1.0
    """Factor on the lengths of generated trainings."""
    rigid_share: Share = 0.0
    """Share of the jobs that run on `rigid_gpus` and on no other number."""
    rigid_gpus: PositiveInt = 16
    """GPUs of each rigid job."""
    replica_share: Share = 0.0
    """Share of the other jobs whose GPUs are a multiple of `replica_gpus`."""
    replica_gpus: PositiveInt = 8
    """GPUs of a replica, such as those of tensor parallelism."""
    most_jobs: PositiveInt | None = None
    """Jobs that are read of a file, the first ones."""


def generate(
    applications: Mapping[str, Application],
    jobs: int,
    hours: float,
    *,
    cluster_gpus: int,
    seed: int = 0,
    sweep: int = 1,
    length: float = 1.0,
) -> tuple[Submission, ...]:
    """Generate so many jobs over about so many hours.

    Fewer where there are sweeps. The same seed gives the same trace.
    """
    random = np.random.default_rng([seed, 0x6E])
    names = sorted(applications)
    weight = np.array([_gpu_seconds(applications[name]) ** -0.5 for name in names])
    weight /= weight.sum()
    found: list[Submission] = []
    arrivals = iter(_arrivals(random, jobs, hours))
    while len(found) < jobs:
        time = round(next(arrivals), 3)
        name = names[int(random.choice(len(names), p=weight))]
        app = applications[name]
        trials = min(sweep, jobs - len(found)) if sweep > 1 and random.random() < SWEEPS else 1
        most = 1 if trials > 1 else min(most_gpus(app), cluster_gpus)
        gpus = min(int(random.choice(list(GPUS), p=list(GPUS.values()))), most)
        limits = app.limits
        batch = app.fixed_batch or min(max(limits.initial, limits.local_min) * gpus, limits.maximum)
        for _ in range(trials):
            work = length * float(np.exp(random.normal(0.0, 0.5)))
            found.append(Submission(f"{name}-{len(found)}", time, name, gpus, batch, work))
    return tuple(found)


def stiffened(
    jobs: Sequence[Submission], applications: Mapping[str, Application], trace: Trace, seed: int
) -> tuple[Submission, ...]:
    """Return the jobs, some of them rigid or of replicas, as the trace says.

    Those whose application cannot use so many GPUs stay as they are.
    """
    random = np.random.default_rng([seed, 0x516])
    rigid = (random.random(len(jobs)) < trace.rigid_share).tolist()
    replicated = (random.random(len(jobs)) < trace.replica_share).tolist()
    return tuple(map(partial(_stiffened, applications, trace), jobs, rigid, replicated))


def _stiffened(
    applications: Mapping[str, Application], trace: Trace, job: Submission, rigid: bool, replicated: bool
) -> Submission:
    most = most_gpus(applications[job.application])
    if rigid and trace.rigid_gpus <= most:
        return replace(job, gpus=trace.rigid_gpus, rigid=True)
    if replicated and trace.replica_gpus <= most:
        each = trace.replica_gpus
        asked = min(-(-job.gpus // each), most // each) * each
        return replace(job, gpus=asked, gpu_counts=f"multiples-of-{each}")
    return job


def _arrivals(random: np.random.Generator, jobs: int, hours: float) -> list[float]:
    """Return times [s] by thinning.

    Candidates at the highest rate are kept in proportion to the present one.
    """
    highest = (1.0 + DEPTH) * jobs / (hours * 3600.0)
    times: list[float] = []
    time = 0.0
    while len(times) < jobs:
        time += float(random.exponential(1.0 / highest))
        hour = BEGIN + time / 3600.0
        rate = 1.0 - DEPTH * math.cos(2 * math.pi * (hour - 2.0) / 24.0)
        if random.random() < rate / (1.0 + DEPTH):
            times.append(time)
    return times


def _gpu_seconds(app: Application) -> float:
    """Of the whole training on one GPU at about M0."""
    step, _ = app.times((1,), min(max(app.limits.initial, app.limits.local_min), app.limits.local_max))
    return app.progress(app.epochs) * step
