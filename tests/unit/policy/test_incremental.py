"""A cache kept over many cycles changes no plan.

Each plan equals the plan that is made without a cache. The policy repeats no work on unchanged input.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.goodput import NoiseScale
from polluxd.model import JobSpec, Snapshot, SnapshotJob
from polluxd.policy import Cache, decide, option_table
from tests.build import job, nodes, report, snapshot
from tests.unit.policy.scenarios import applied, random_job, random_snapshot


def a_minute_later(snap: Snapshot, rng: random.Random) -> Snapshot:
    """Return the cluster 60 s later.

    All jobs are older. About one job in twenty has new measurements, some jobs are gone, and some are new.
    Sometimes a node or a setting changes too.
    """
    jobs = []
    for j in snap.jobs:
        if rng.random() < 0.03:
            continue
        found = j.report
        if found is not None and rng.random() < 0.05:
            found = replace(
                found, noise=NoiseScale(1.0, rng.uniform(0.1, 90.0)), explored_gpus=found.explored_gpus + 1
            )
        elif found is not None and rng.random() < 0.2:
            # Told again, nothing learnt: another object that says the same.
            found = replace(found, progress=found.progress + 10.0)
        jobs.append(replace(j, age=j.age + 60.0, report=found, waiting=None if j.placement else j.waiting))
    newest = max((j.job_id for j in snap.jobs), default=0)
    jobs += [random_job(rng, newest + n + 1) for n in range(rng.choice([0, 0, 1, 2]))]
    members = snap.nodes
    if members and rng.random() < 0.2:
        members = (replace(members[0], foreign_gpus=rng.choice([0, 1])), *members[1:])
    chosen = snap.settings
    if rng.random() < 0.1:
        chosen = replace(chosen, hysteresis=rng.choice([0.0, 0.05, 0.2]), power=rng.choice([-1.0, 0.0]))
    return replace(snap, nodes=members, jobs=tuple(jobs), settings=chosen, taken_at=snap.taken_at + 60.0)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6))
def test_incremental_plan_is_the_cold_one_reasons_included(seed):
    rng = random.Random(seed)
    snap = random_snapshot(seed, jobs=rng.randint(5, 40), count=rng.randint(2, 10))
    cache = Cache()
    for _ in range(6):
        plan = decide(snap, cache=cache)
        assert plan == decide(snap)
        snap = a_minute_later(applied(snap, plan), rng)


def test_what_nobody_changed_is_neither_evaluated_nor_listed_again(monkeypatch):
    snap = snapshot(nodes(8), [job(n, JobSpec(max_gpus=n % 3 + 1), report=report()) for n in range(1, 41)])
    cache = Cache()
    for _ in range(3):
        snap = applied(snap, decide(snap, cache=cache))
    decide(snap, cache=cache)
    redone: list[object] = []
    real_tables = option_table.best_sizes
    monkeypatch.setattr(
        option_table, "best_sizes", lambda jobs, *more: redone.append(jobs) or real_tables(jobs, *more)
    )
    older = replace(snap, jobs=tuple(replace(j, age=j.age + 1e-9) for j in snap.jobs))
    decide(older, cache=cache)
    assert not redone
    entries = {number: id(entry) for number, entry in cache.listed.items()}

    def other(j: SnapshotJob) -> SnapshotJob:
        return replace(j, report=report("stubborn")) if j.job_id == 7 else j

    decide(replace(older, jobs=tuple(other(j) for j in older.jobs)), cache=cache)
    assert cache.misses == 1
    assert [[j.job_id for j in jobs] for jobs in redone if isinstance(jobs, list)] == [[7]]
    assert {number: id(entry) for number, entry in cache.listed.items()} == entries
