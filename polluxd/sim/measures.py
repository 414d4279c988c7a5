"""The figures of a run: completion times, fairness, efficiency.

The yardstick of finish-time fairness is the time of a job alone on a share of the cluster (`Alone`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.applications import Application, ScaledApplication, most_gpus, placement_of, split_batch
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import SimulationResult
from polluxd.sim.simulated_job import SimulatedJob
from polluxd.sim.workload import Submission

Floats = NDArray[np.float64]

SIZES = 16
"""Batch sizes tried, in geometric spacing."""


class Alone:
    """Times of one application alone on GPUs of one kind of node.

    Its batch size is tuned in every epoch.

    The same yardstick for all policies: true step times and true noise, no restarts.
    """

    def __init__(self, app: Application, gpus_per_node: int) -> None:
        self._app = app
        self._per_node = gpus_per_node
        limits = app.limits
        grid = np.geomspace(limits.initial, limits.maximum, SIZES).round().astype(np.int64)
        self._sizes = (
            [app.fixed_batch] if app.fixed_batch is not None else sorted({int(size) for size in grid})
        )
        epochs = range(app.epochs)
        noise = [[app.noise(size, epoch) for epoch in epochs] for size in self._sizes]
        var = np.array([[n.var for n in row] for row in noise])
        sqr = np.array([[n.sqr for n in row] for row in noise])
        scale = np.array(self._sizes, dtype=np.float64)[:, None] / limits.initial
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = (var + sqr) / (var / scale + sqr)
        self._gain = np.where(np.isfinite(gain), gain, scale)
        self._work = np.diff([app.progress(epoch) for epoch in range(app.epochs + 1)])
        self._known: dict[int, float] = {}

    def on(self, share: float) -> float:
        """Return seconds on `share` GPUs, packed.

        Below one GPU by time slices, between two counts in proportion.
        """
        most = most_gpus(self._app)
        if share < 1:
            return self._at(1) / max(share, 1e-9)
        low, high = int(share), min(int(share) + 1, most)
        if low >= high:
            return self._at(min(low, most))
        part = share - low
        return 1.0 / ((1.0 - part) / self._at(low) + part / self._at(high))

    def _at(self, gpus: int) -> float:
        """Return the best time of all counts up to this one.

        A share need not be used up. Beyond one node, whole nodes count.
        """
        counts = (k for k in range(1, gpus + 1) if k <= self._per_node or k % self._per_node == 0)
        return min(self._exactly(k) for k in counts)

    def _exactly(self, gpus: int) -> float:
        if gpus not in self._known:
            limits = self._app.limits
            times = np.full(len(self._sizes), np.inf)
            for i, size in enumerate(self._sizes):
                m, s = split_batch(size, gpus, limits)
                if limits.local_min <= m <= limits.local_max:
                    step, sync = self._app.times(placement_of(gpus, self._per_node), m)
                    times[i] = step + s * (step - sync)
            with np.errstate(divide="ignore"):
                seconds = self._work / (self._gain / times[:, None]).max(axis=0)
            self._known[gpus] = float(seconds.sum())
        return self._known[gpus]


def contention(submitted: Floats, ended: Floats) -> Floats:
    """[J]: jobs in the system, itself included, averaged over each job's life."""
    order = np.sort(submitted), np.sort(ended)

    def area(times: Floats) -> Floats:
        """Job-seconds in the system up to each time."""
        total = np.zeros(times.size)
        for edges, sign in ((order[0], 1.0), (order[1], -1.0)):
            sums = np.concatenate([[0.0], np.cumsum(edges)])
            count = np.searchsorted(edges, times, side="right")
            total += sign * (count * times - sums[count])
        return total

    life = np.maximum(ended - submitted, 1e-9)
    return np.maximum((area(ended) - area(submitted)) / life, 1.0)


def measure(run: SimulationResult, scenario: Scenario) -> dict[str, Any]:
    """Return the figures of one run, JSON-ready, in seconds.

    `jobs` maps each job to its completion time.
    """
    jobs = run.jobs
    submitted = np.array([job.submission.time for job in jobs])
    ended = np.array([job.ended_at for job in jobs], dtype=np.float64)
    jct = ended - submitted
    rho = fairness(jobs, scenario)
    trained = sum(job.trained_seconds for job in jobs)
    decisions = np.array(run.decision_seconds or [0.0]) * 1e3
    cloud = scenario.cloud
    node_hours = run.node_seconds / 3600.0
    return {
        **({"node_hours": node_hours, "cost": node_hours * cloud.price} if cloud is not None else {}),
        "avg_jct_s": float(jct.mean()),
        "p50_jct_s": float(np.percentile(jct, 50)),
        "p99_jct_s": float(np.percentile(jct, 99)),
        "makespan_s": float(ended.max() - submitted.min()),
        "avg_restarts": float(np.mean([job.restarts for job in jobs])),
        "gpu_hours": sum(job.gpu_seconds for job in jobs) / 3600.0,
        "avg_efficiency": sum(job.efficient_seconds for job in jobs) / trained if trained else 0.0,
        "finish_time_fairness": {
            "mean": float(rho.mean()),
            "p99": float(np.percentile(rho, 99)),
            "worst": float(rho.max()),
            "share_above_1": float(np.mean(rho > 1.0)),
        },
        "decision_ms": {"median": float(np.median(decisions)), "max": float(decisions.max())},
        "decisions": len(run.decision_seconds),
        "idle_s": run.idle_seconds,
        "classes": classes(jobs, jct, rho, scenario),
        "jobs": {job.submission.name: float(t) for job, t in zip(jobs, jct, strict=True)},
        "details": [
            {
                "name": job.submission.name,
                "application": job.app.name,
                "submitted_s": job.submission.time,
                "started_s": job.started_at,
                "ended_s": job.ended_at,
                "restarts": job.restarts,
                "gpu_hours": job.gpu_seconds / 3600.0,
                "fairness": float(r),
            }
            for job, r in zip(jobs, rho, strict=True)
        ],
        "timeline": [[m.time, m.jobs, m.gpus, round(m.efficiency, 4)] for m in run.moments],
    }


def _size(job: Submission) -> str:
    return "rigid" if job.rigid else "elastic" if job.gpu_counts == "any" else "replicas"


def classes(
    jobs: Sequence[SimulatedJob], jct: Floats, rho: Floats, scenario: Scenario
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of each class of jobs, so that no mean hides who waits.

    By kind of class, then by class: number of jobs, mean completion time [s], worst fairness.
    """
    kinds = {
        "gpus": [str(job.submission.gpus) for job in jobs],
        "size": [_size(job.submission) for job in jobs],
        "application": [job.app.name for job in jobs],
        "user": [f"user-{job.number % scenario.users + 1}" for job in jobs],
    }
    found: dict[str, dict[str, dict[str, float]]] = {}
    for kind, names in kinds.items():
        for name in sorted(set(names)):
            mine = np.array([other == name for other in names])
            found.setdefault(kind, {})[name] = {
                "jobs": int(mine.sum()),
                "avg_jct_s": float(jct[mine].mean()),
                "fairness_worst": float(rho[mine].max()),
            }
    return found


def fairness(jobs: Sequence[SimulatedJob], scenario: Scenario) -> Floats:
    """Return rho [J]: completion time over the time alone on a fair share.

    The share is 1/contention of the cluster; at most 1 is fair.
    """
    submitted = np.array([job.submission.time for job in jobs])
    ended = np.array([job.ended_at for job in jobs], dtype=np.float64)
    part = Counter[str]()
    sizes: dict[str, int] = {}
    for kind, size in zip(scenario.types, scenario.sizes, strict=True):
        part[kind] += size
        sizes[kind] = max(size, sizes.get(kind, 0))
    known: dict[tuple[str, str], Alone] = {}

    def alone(job: SimulatedJob, gpus: float) -> float:
        """Return seconds of the whole training alone on such a share.

        The share has the types of the cluster.
        """
        rate = 0.0
        for kind, of_kind in part.items():
            app = job.on[kind]
            key = job.app.name, kind
            if key not in known:
                known[key] = Alone(app.app if isinstance(app, ScaledApplication) else app, sizes[kind])
            rate += of_kind / scenario.gpus / known[key].on(gpus)
        return 1.0 / rate

    share = scenario.gpus / contention(submitted, ended)
    ideal = np.array([job.submission.work * alone(job, float(s)) for job, s in zip(jobs, share, strict=True)])
    rho: Floats = (ended - submitted) / ideal
    return rho
