"""Clusters and jobs for the policy's tests.

Some are written by hand, some come from hypothesis, and some are random.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings
from polluxd.model import NO_PLACEMENT, JobSpec, Placement, Report, Snapshot, SnapshotJob
from polluxd.policy.domains import split
from polluxd.policy.option_table import build
from polluxd.policy.packing import Packing
from polluxd.policy.placement import Seating
from tests.build import job, node, snapshot


def applied(snap, plan):
    """The snapshot after the plan: every job where it was put."""
    jobs = []
    for j in snap.jobs:
        allocation = plan.of(j.job_id)
        place = allocation.placement if allocation else NO_PLACEMENT
        jobs.append(replace(j, placement=place, started=j.started or bool(place)))
    return replace(snap, jobs=tuple(jobs))


def random_job(rng: random.Random, number: int) -> SnapshotJob:
    theta = ThroughputParams(
        rng.uniform(0.01, 0.2), rng.uniform(1e-4, 5e-3), rng.uniform(1e-3, 0.2), rng.uniform(1e-5, 0.02),
        rng.uniform(1e-3, 0.5), rng.uniform(1e-5, 0.05), rng.uniform(1.0, 5.0),
    )  # fmt: skip
    initial = rng.choice([16, 64, 128, 256])
    limits = BatchLimits(
        initial, initial * rng.choice([1, 8, 64]), rng.choice([1, 8, 16]), rng.choice([64, 512])
    )
    noise = rng.choice([None, NoiseScale(1.0, rng.choice([0.1, 1.0, 10.0, 100.0]))])
    low = rng.choice([1, 1, 1, 1, 2, 4])
    spec = JobSpec(
        min_gpus=low,
        max_gpus=rng.choice([None, None, low, low + 3, 8, 16]),
        adaptive=rng.random() < 0.8,
        preemptible=rng.random() < 0.9,
        gpu_counts=rng.choice(["any", "any", "any", "any", "powers-of-two", "whole-nodes", "1,2,3,12"]),
    )
    if spec.max_gpus is not None and spec.max_gpus < low:
        spec = replace(spec, max_gpus=low)
    found = None
    if rng.random() < 0.85:
        fitted = rng.random() < 0.9
        found = Report(
            0, 0.0, limits, theta if fitted else None, noise, explored_gpus=rng.choice([0, 1, 2, 4, 8, 64]),
            progress=rng.uniform(0, 1000), target=rng.choice([None, 1000.0]),
        )  # fmt: skip
    age = rng.choice([10.0, 600.0, 36000.0])
    return job(
        number,
        spec,
        report=found,
        age=age,
        partition=rng.choice(["main", "main", "main", "side", "main,side"]),
        account=rng.choice(["lab", "big"]),
        user=rng.choice(["ada", "bob"]),
        waiting=rng.choice([None, None, 5.0]),
        weight=rng.choice([1.0, 1.0, 2.0]),
        started=found is not None,
        lost_seconds=rng.uniform(0, age / 3),
        move_cost=rng.uniform(5, 60),
    )


def random_snapshot(seed: int, *, jobs: int | None = None, count: int | None = None, power=None) -> Snapshot:
    """Return a random cluster in mid-life.

    First fit has placed some jobs. Some nodes are drained or shared with foreign jobs.
    """
    rng = random.Random(seed)
    size = rng.choice([2, 4, 4, 4, 8])
    members = [
        node(
            f"n{i:03d}",
            size,
            partitions=frozenset(rng.choice([{"main"}, {"main"}, {"main", "side"}, {"side"}])),
            foreign_gpus=rng.choice([0, 0, 0, 0, 1]),
            schedulable=rng.random() < 0.92,
        )
        for i in range(count if count is not None else rng.randint(0, 6))
    ]
    pending = [random_job(rng, n) for n in range(1, 1 + (jobs if jobs is not None else rng.randint(0, 9)))]
    left = {n.name: n.capacity for n in members}
    placed = []
    for j in pending:
        place = NO_PLACEMENT
        if rng.random() < 0.6:
            wanted = max(j.spec.min_gpus, rng.randint(1, size))
            for n in members:
                usable = not n.partitions.isdisjoint(j.partition.split(","))
                if usable and wanted <= size and left[n.name] >= wanted:
                    place = Placement((n.name,), wanted)
                    left[n.name] -= wanted
                    break
        placed.append(
            replace(
                j,
                placement=place,
                started=j.started or bool(place),
                pinned=bool(place) and rng.random() < 0.1,
            )
        )
    settings = PolicySettings(
        objective="fair-share",
        power=power if power is not None else rng.choice([-1.0, -1.0, 1.0, 0.0, -10.0, float("-inf")]),
        account_weights=rng.choice([{}, {"big": 3.0}]),
        partial_nodes=rng.random() < 0.2,
        account_ceilings=rng.choice([{}, {}, {"lab": 5}, {"lab": 7, "big": 4}]),
        user_ceilings=rng.choice([{}, {}, {"bob": 3}]),
        account_guarantees=rng.choice([{}, {}, {"big": 3}]),
        gpu_counts=rng.choice(["any", "any", "any", "powers-of-two"]),
    )
    return Snapshot("test", 1e9, tuple(members), tuple(placed), settings)


snapshots = st.integers(0, 10**6).map(random_snapshot)


def seating_of(members, jobs, **settings):
    snap = snapshot(members, jobs, **settings)
    (domain,) = split(snap)
    table = build(domain, snap.settings)
    packing = Packing(domain.nodes, table.jobs, partial=snap.settings.partial_nodes, groups=table.groups)
    return Seating(table, packing), domain


def options_of(seating, *gpus):
    """Number each job's option of so many GPUs; where it stays, if it can."""
    table = seating.table
    return np.array(
        [
            max((o for o in table.options(j) if table.gpus[o] == count), key=lambda o: table.kept[o])
            for j, count in enumerate(gpus)
        ]
    )
