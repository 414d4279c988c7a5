"""The figures of a run: completion times, fairness, efficiency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from polluxd.sim.alone import Alone, contention
from polluxd.sim.applications import ScaledApplication
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import SimulationResult
from polluxd.sim.simulated_job import SimulatedJob

Floats = NDArray[np.float64]


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


def classes(
    jobs: Sequence[SimulatedJob], jct: Floats, rho: Floats, scenario: Scenario
) -> dict[str, dict[str, dict[str, float]]]:
    """Return the figures of each class of jobs, so that no mean hides who waits.

    By kind of class, then by class: number of jobs, mean completion time [s], worst fairness.
    """
    kinds = {
        "gpus": [str(job.submission.gpus) for job in jobs],
        "size": ["rigid" if job.submission.rigid else "elastic" for job in jobs],
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
