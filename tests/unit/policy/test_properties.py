"""Properties that hold on every cluster.

More capacity never hurts, no job moves without a gain, and limits hold over time.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polluxd.config.settings import PolicySettings
from polluxd.model import NO_PLACEMENT
from polluxd.policy import decide, worth
from polluxd.policy.feasible import is_pinned
from tests.build import node
from tests.unit.policy.invariants import check
from tests.unit.policy.scenarios import applied, random_snapshot, snapshots

POWERS = (-1.0, 0.0, 1.0, -10.0, float("-inf"))


def plans(seed, counts, power, size):
    """Return one plan per node count, with a fair share that does not grow.

    Speedups are relative to the fair share. If the share grew, more nodes could look like less.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worth, "fair_share", lambda *_: worth.FairShare(1, 1))
        return [decide(able(seed, count, power, size)) for count in counts]


def able(seed, count, power, sizes):
    """A cluster on which every job can run, and nobody is pinned."""
    snap = random_snapshot(seed, jobs=1 + seed % 8, count=0, power=power)
    jobs = [
        replace(
            j,
            partition="main",
            pinned=False,
            placement=NO_PLACEMENT,
            spec=replace(j.spec, min_gpus=1, max_gpus=None, gpu_counts="any", cpus_per_gpu=1),
        )
        for j in snap.jobs
    ]
    nodes = tuple(node(f"n{i:03d}", sizes) for i in range(count))
    return replace(
        snap, nodes=nodes, jobs=tuple(jobs), settings=PolicySettings(objective="fair-share", power=power)
    )


@pytest.mark.parametrize("power", POWERS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 8))
def test_more_capacity_never_lowers_fitness_where_every_count_can_be_placed(power, seed, count):
    less, more = plans(seed, (count, count + 1), power, 1)
    assert more.objective >= less.objective * (1 - 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("power", POWERS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 5))
def test_more_nodes_never_lower_fitness_by_more_than_the_certified_gap(power, seed, count):
    less, more = plans(seed, (count, count + 1), power, 4)
    assert more.upper_bound >= less.objective * (1 - 1e-9)
    assert more.objective >= less.objective * (1 - 0.01)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(snapshots)
@example(random_snapshot(7341))  # its home came free only after the search
def test_no_job_moves_to_a_placement_like_its_own_while_its_own_is_free(snap):
    plan = decide(snap)
    by_name = {n.name: n for n in snap.nodes}
    free = Counter({n.name: n.capacity for n in snap.nodes})
    spans = Counter()
    for a in plan.allocations:
        for name in a.placement.nodes:
            free[name] -= a.placement.gpus_per_node
            spans[name] += len(a.placement.nodes) > 1
    for j in snap.jobs:
        a = plan.of(j.job_id)
        alike = (len(a.placement.nodes), a.placement.gpus_per_node) == (
            len(j.placement.nodes),
            j.placement.gpus_per_node,
        )
        if not a.changed or not alike or not a.placement:
            continue
        own = Counter(dict.fromkeys(a.placement.nodes, a.placement.gpus_per_node))
        assert not all(
            name in by_name
            and by_name[name].schedulable
            and not by_name[name].partitions.isdisjoint(j.partition.split(","))
            and free[name] + own[name] >= j.placement.gpus_per_node
            and (len(j.placement.nodes) == 1 or spans[name] - (name in own) <= 0)
            for name in j.placement.nodes
        ), j.job_id


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6))
def test_limits_hold_over_a_cluster_s_life(seed):
    snap = random_snapshot(seed)
    for cycle in range(4):
        plan = decide(snap)
        check(snap, plan)
        for j in snap.jobs:
            if is_pinned(j):
                assert not plan.of(j.job_id).changed
        snap = applied(snap, plan)
        jobs = tuple(replace(j, age=j.age + 60, lost_seconds=j.lost_seconds + cycle) for j in snap.jobs)
        snap = replace(snap, jobs=jobs)
