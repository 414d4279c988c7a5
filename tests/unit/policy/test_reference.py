"""The paper's genetic algorithm does no better than the policy.

Both are held to the same placements.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polluxd.config.settings import PolicySettings
from polluxd.policy import decide
from tests.build import job, node, nodes, report, snapshot
from tests.unit.policy import genetic
from tests.unit.policy.scenarios import applied, random_snapshot


def plain(seed, jobs):
    """Return a random cluster that the reference can plan.

    The cluster has one partition and equal nodes. No job is pinned, and there are no limits.
    """
    snap = random_snapshot(seed, jobs=jobs, count=4)
    free = tuple(
        replace(n, partitions=frozenset({"main"}), foreign_gpus=0, schedulable=True) for n in snap.nodes
    )
    members = tuple(
        replace(j, partition="main", pinned=False, spec=replace(j.spec, preemptible=True)) for j in snap.jobs
    )
    return replace(snap, nodes=free, jobs=members, settings=PolicySettings(objective="fair-share"))


@pytest.mark.parametrize("seed", range(8))
def test_policy_is_no_worse_than_the_reference(seed):
    snap = plain(seed, jobs=5 + seed)
    ours, theirs = decide(snap), genetic.decide(snap, population=40, generations=25)
    assert theirs.objective <= ours.upper_bound * (1 + 1e-9)
    assert ours.objective >= theirs.objective * (1 - 1e-9)
    assert np.all(theirs.allocations.sum(axis=0) <= [n.capacity for n in snap.nodes])


def test_reference_finds_the_optimum_of_a_small_cluster():
    snap = snapshot(nodes(2), [job(n, report=report(k)) for n, k in ((1, "scalable"), (2, "stubborn"))])
    plan = decide(snap)
    assert genetic.decide(snap).objective == pytest.approx(plan.objective)
    again = applied(snap, plan)
    assert genetic.decide(again).objective == pytest.approx(decide(again).objective)


def test_reference_refuses_what_it_does_not_model():
    with pytest.raises(ValueError, match="equal nodes"):
        genetic.decide(snapshot([node("a", 4), node("b", 8)], [job(1)]))
    with pytest.raises(ValueError, match="ceilings"):
        genetic.decide(snapshot(nodes(1), [job(1)], account_ceilings={"lab": 1}))
