"""What the trainings of a log did: an assumption, made twice.

A log says how many GPUs a job held and for how long, not what it trained, nor at which batch size. Each job is taken
for one of some applications, run to the end on its GPUs: for the one whose whole training takes the time nearest to the
recorded one, by ratio. Its length is then scaled so that the job, run as it was, takes exactly the time recorded.

`tuned`: its user chose the batch size that ends soonest on these GPUs, and of the applications those alone count that
use the GPUs at half of linear speedup or better (the paper's rule for tuned users, Pollux, section 5.2). If none does,
the one that uses them best. Otherwise its user multiplied M0 by the number of GPUs and looked no further.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from polluxd.sim.applications import Application, most_gpus, placement_of, split_batch
from polluxd.sim.cluster_logs import Log, Recorded
from polluxd.sim.workload import Submission, TraceError

LEAST_EFFICIENCY = 0.5
_SIZES = 33
"""A user who tunes takes the best of so many batch sizes, at equal ratios."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A log's trainings under one assumption."""

    jobs: tuple[Submission, ...]
    recorded_gpu_hours: float
    least_gpu_hours: float
    """What the same work needs on one GPU each, at the batch size that is best there."""


def replayed(
    log: Log,
    applications: Mapping[str, Application],
    *,
    tuned: bool,
    cluster_gpus: int,
    gpus_per_node: int,
    most_jobs: int | None = None,
) -> Replay:
    """Return the trainings that fit the cluster, from the first submission on; `most_jobs`: the first so many.

    Raises TraceError where none fits.
    """
    found = fitting(log, applications, cluster_gpus)[:most_jobs]
    if not found:
        least = min(job.gpus for job in log.jobs)
        raise TraceError(
            f"every training has {least} GPUs or more, and the cluster {cluster_gpus}; simulate more nodes"
        )
    assign = _Assignment(applications, gpus_per_node, tuned=tuned)
    names: dict[str, int] = {}
    jobs, least_hours = [], 0.0
    for job in found:
        # A requeued job stands in sacct's output once for each of its runs.
        names[job.name] = names.get(job.name, 0) + 1
        name = job.name if names[job.name] == 1 else f"{job.name}+{names[job.name] - 1}"
        submission = assign.submission(job, name, job.submitted - found[0].submitted)
        least_hours += submission.work * assign.best(submission.application, 1)[1] / 3600
        jobs.append(submission)
    recorded = sum(job.gpus * job.seconds for job in found) / 3600
    return Replay(tuple(jobs), recorded, least_hours)


def fitting(log: Log, applications: Mapping[str, Application], cluster_gpus: int) -> tuple[Recorded, ...]:
    """Return the trainings that have no more GPUs than the cluster, or than some application can use."""
    most = min(cluster_gpus, max(map(most_gpus, applications.values())))
    return tuple(job for job in log.jobs if job.gpus <= most)


class _Assignment:
    """The rule of this module's docstring, over some applications."""

    def __init__(self, applications: Mapping[str, Application], gpus_per_node: int, *, tuned: bool) -> None:
        self._apps = applications
        self._per_node = gpus_per_node
        self._tuned = tuned
        self._best: dict[tuple[str, int], tuple[int, float]] = {}
        self._able: dict[int, Sequence[str]] = {}

    def _seconds(self, app: Application, gpus: int, batch: int) -> float:
        m, s = split_batch(batch, gpus, app.limits)
        step, sync = app.times(placement_of(gpus, self._per_node), m)
        return app.iterations(batch, app.epochs - 1) * (step + s * (step - sync))

    def best(self, name: str, gpus: int) -> tuple[int, float]:
        """Return the batch size at which the whole training ends soonest on so many GPUs, and its seconds."""
        key = name, gpus
        if key not in self._best:
            app, limits = self._apps[name], self._apps[name].limits
            low = min(max(limits.initial, limits.local_min * gpus), limits.maximum)
            grid = np.geomspace(low, limits.maximum, _SIZES).round().astype(np.int64)
            sizes = {app.fixed_batch} if app.fixed_batch is not None else {int(size) for size in grid}
            seconds, batch = min((self._seconds(app, gpus, size), size) for size in sizes)
            self._best[key] = batch, seconds
        return self._best[key]

    def _trained(self, name: str, gpus: int) -> tuple[int, float]:
        """Return the batch size that the job's user chose, and the seconds of a whole training at it."""
        if self._tuned:
            return self.best(name, gpus)
        app, limits = self._apps[name], self._apps[name].limits
        batch = min(max(limits.initial * gpus, limits.local_min * gpus), limits.maximum)
        batch = batch if app.fixed_batch is None else app.fixed_batch
        return batch, self._seconds(app, gpus, batch)

    def _used_well(self, gpus: int) -> Sequence[str]:
        """Return the applications that a user may have run on so many GPUs."""
        if gpus not in self._able:
            able = sorted(name for name, app in self._apps.items() if most_gpus(app) >= gpus)
            if self._tuned:
                share = {name: self.best(name, 1)[1] / (gpus * self.best(name, gpus)[1]) for name in able}
                most = max(share.values())
                able = [name for name in able if share[name] >= min(LEAST_EFFICIENCY, most)]
            self._able[gpus] = able
        return self._able[gpus]

    def submission(self, job: Recorded, name: str, time: float) -> Submission:
        def ratio(app: str) -> float:
            return abs(math.log(job.seconds / self._trained(app, job.gpus)[1]))

        chosen = min(self._used_well(job.gpus), key=ratio)
        batch, seconds = self._trained(chosen, job.gpus)
        return Submission(name, time, chosen, job.gpus, batch, job.seconds / seconds)
