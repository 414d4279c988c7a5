"""States of a cluster to decide on: made up or recorded.

Recorded states come from simulator runs of the daemon's policy.
"""

from __future__ import annotations

import csv
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.model import JobSpec, Node, Plan, Report, Snapshot, SnapshotJob
from polluxd.policy import Cache, decide
from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.daemon_engine import simulate_daemon
from polluxd.sim.profiles import load_profiles
from polluxd.sim.workload import Submission
from tests import build

CHURN, REFIT = 0.01, 0.05
"""Shares of jobs per cycle: that leave and are replaced; that have a new fit and noise scale."""
INTERVAL = 60.0


def rough(seed: int) -> Scenario:
    """Return a rough world; each application's restart cost is drawn from 15 to 250 s, on a logarithmic scale."""
    names = (*BUILT_IN, "bert", "cifar10", "deepspeech2", "imagenet", "ncf", "yolov3")
    draws = {name: np.random.default_rng([seed, zlib.crc32(name.encode())]).random() for name in names}
    restarts = {name: float(15.0 * (250.0 / 15.0) ** draw) for name, draw in draws.items()}
    return Scenario(jitter=0.1, restarts=restarts, failures_per_day=2.0, seed=seed)


def arrival(rng: random.Random, number: int) -> tuple[SnapshotJob, Report]:
    """Return a new job, and the report that its agent sends once it runs."""
    theta = ThroughputParams(
        rng.uniform(0.01, 0.2),
        10 ** rng.uniform(-4, -2.3),
        10 ** rng.uniform(-3, -0.7),
        10 ** rng.uniform(-5, -1.7),
        10 ** rng.uniform(-2, -0.3),
        10 ** rng.uniform(-5, -1.3),
        rng.uniform(1, 5),
    )
    initial = rng.choice([32, 64, 128, 256])
    limits = BatchLimits(initial, initial * 64, 8, 512)
    noise = NoiseScale(1.0, 10 ** rng.uniform(-1, 2.5))
    report = Report(0, 0.0, limits, theta, noise, explored_gpus=1, target=10 ** (3 + 3 * (number % 97) / 97))
    spec = JobSpec(min_gpus=rng.choice([1] * 9 + [2, 4]), max_gpus=rng.choice([None, None, None, 4, 16]))
    return build.job(number, spec, age=0.0, move_cost=rng.uniform(10, 40)), report


def refitted(rng: random.Random, report: Report) -> Report:
    """Return the report of the same training, measured slightly differently.

    So nothing that a cache holds about the training is valid any more.
    """
    params, noise = report.params, report.noise
    if params is None or noise is None:
        return report
    return replace(
        report,
        params=params._replace(alpha_grad=params.alpha_grad * rng.uniform(0.97, 1.03)),
        noise=noise._replace(var=noise.var * rng.uniform(0.95, 1.08)),
    )


FAIR_SHARE = PolicySettings(objective="fair-share")
"""The paper's objective, under which the policy can be compared with the genetic algorithm."""


def typed(job: SnapshotJob, types: int) -> SnapshotJob:
    """Return the job with a fit for each GPU type."""
    report = job.report
    if types < 2 or report is None or report.params is None:
        return job
    rng, speed, fits = random.Random(job.job_id), 1.0, {}
    for kind in range(types):
        fits[f"type{kind}"] = report.params._replace(
            alpha_grad=report.params.alpha_grad / speed, beta_grad=report.params.beta_grad / speed
        )
        speed *= rng.uniform(1.0, 2.0)
    return replace(job, report=replace(report, gpu_type="type0", params_by_type=fits))


def life(
    gpus: int,
    jobs: int,
    seed: int,
    cycles: int,
    decide: Callable[[Snapshot], Plan],
    *,
    per_node: int = 4,
    settings: PolicySettings = FAIR_SHARE,
    types: int = 1,
) -> Iterator[Snapshot]:
    """Yield snapshots of a cluster in which about `jobs` jobs live.

    With several GPU types, each is up to twice as fast as the one before, and how much differs from job to job. Each
    snapshot starts from the placements that `decide` chose for the one before.
    """
    rng = random.Random(seed)
    nodes = tuple(
        Node(
            f"n{i:05d}",
            per_node,
            gpu_type=f"type{i % types}" if types > 1 else "",
            partitions=frozenset({"main"}),
        )
        for i in range(gpus // per_node)
    )
    alive: dict[int, SnapshotJob] = {}
    agents: dict[int, Report] = {}
    newest = 0
    for _ in range(jobs):
        newest += 1
        job, agents[newest] = arrival(rng, newest)
        # At the start every job has already run for one minute to about nine hours, and has grown.
        agents[newest] = replace(agents[newest], explored_gpus=rng.choice([1, 1, 2, 2, 4, 8, 16]))
        alive[newest] = replace(job, age=10 ** rng.uniform(1.8, 4.5), report=agents[newest], started=True)
    for _ in range(cycles):
        snapshot = Snapshot("bench", 0.0, nodes, tuple(typed(job, types) for job in alive.values()), settings)
        yield snapshot
        for a in decide(snapshot).allocations:
            job, held = alive[a.job_id], a.placement.gpus
            report = job.report or (agents[a.job_id] if held else None)
            if report is not None and report.explored_gpus < held:
                report = replace(report, explored_gpus=held)
            if report is not None and held and rng.random() < REFIT:
                report = refitted(rng, report)
            lost = job.move_cost if a.changed and job.started else 0.0
            alive[a.job_id] = replace(
                job,
                placement=a.placement,
                report=report,
                started=job.started or held > 0,
                age=job.age + INTERVAL,
                lost_seconds=job.lost_seconds + lost,
                moves=job.moves + (lost > 0),
            )
        for number in [n for n in alive if rng.random() < CHURN]:
            del alive[number]
            newest += 1
            alive[newest], agents[newest] = arrival(rng, newest)


def recorded(data: Path, workload: str, scenario: Scenario, keep: int) -> list[Snapshot]:
    """Return `keep` states from the simulated run of one workload.

    They are spread evenly over the run, and each has a job in it. `workload` is a path such as `workloads/workload-1`.
    """
    apps = load_profiles(data / "profiles")
    with (data / f"{workload}.csv").open() as lines:
        # The policy sizes jobs itself. It ignores the sizes that users asked for, which some jobs could not use.
        jobs = tuple(
            Submission(row["name"], float(row["time"]), row["application"], 1, int(row["batch_size"]))
            for row in csv.DictReader(lines)
        )
    busy: list[Snapshot] = []

    def watched(snapshot: Snapshot, *, cache: Cache) -> Plan:
        if snapshot.jobs:
            busy.append(snapshot)
        return decide(snapshot, cache=cache)

    shared = replace(scenario, policy=PolicySettings(objective="fair-share"))
    simulate_daemon(jobs, apps, shared, decide=watched)
    return busy[:: max(len(busy) // keep, 1)]
