"""A cache kept between two decisions saves work and changes no plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.goodput import NoiseScale
from polluxd.model import JobSpec
from polluxd.policy import Cache, decide
from tests.build import job, nodes, report, snapshot
from tests.unit.policy.scenarios import applied, random_snapshot


def changed(snap, seed):
    """Return the cluster one cycle (60 s) later.

    All jobs are older, and one job in three has new measurements. Depending on the seed, the first job is
    gone, and a node goes out of service or comes back.
    """
    jobs = []
    for j in snap.jobs[1 if seed % 3 == 0 else 0 :]:
        found = j.report
        if found is not None and (j.job_id + seed) % 3 == 0:
            found = replace(found, noise=NoiseScale(1.0, 1.0 + seed), explored_gpus=found.explored_gpus + 1)
        jobs.append(replace(j, age=j.age + 60, report=found))
    members = snap.nodes
    if members and seed % 4 == 0:
        members = (replace(members[0], schedulable=not members[0].schedulable), *members[1:])
    return replace(snap, nodes=members, jobs=tuple(jobs))


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6))
def test_plan_is_the_same_bit_for_bit_with_and_without_a_cache(seed):
    cache, snap = Cache(), random_snapshot(seed)
    for cycle in range(4):
        plan = decide(snap)
        assert decide(snap, cache=cache) == plan
        snap = changed(applied(snap, plan), seed + cycle)


def test_one_cache_serves_clusters_that_have_nothing_in_common():
    cache = Cache()
    for seed in (1, 2, 1, 3, 2):
        snap = random_snapshot(seed)
        assert decide(snap, cache=cache) == decide(snap)


def test_only_jobs_whose_table_may_differ_are_evaluated():
    snap = snapshot(nodes(4), [job(n, report=report()) for n in range(1, 11)])
    cache = Cache()
    decide(snap, cache=cache)
    assert (cache.hits, cache.misses) == (0, 10)
    older = replace(snap, jobs=tuple(replace(j, age=j.age + 60) for j in snap.jobs))
    decide(older, cache=cache)
    assert (cache.hits, cache.misses) == (10, 0)
    one = replace(older, jobs=(replace(older.jobs[0], report=report("stubborn")), *older.jobs[1:]))
    decide(one, cache=cache)
    assert (cache.hits, cache.misses) == (9, 1)


@pytest.mark.parametrize("gone", [1, 9])
def test_jobs_that_are_gone_are_forgotten(gone):
    jobs = [job(n, JobSpec(max_gpus=1), report=report()) for n in range(1, 11)]
    cache = Cache()
    decide(snapshot(nodes(1), jobs), cache=cache)
    decide(snapshot(nodes(1), jobs[gone:]), cache=cache)
    decide(snapshot(nodes(1), jobs), cache=cache)
    assert cache.misses == gone
