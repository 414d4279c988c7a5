"""The lower bound on the mean completion time.

It is exact where the optimum is known, and below every policy.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.bound import least_mean, least_mean_of
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.generator import generate
from polluxd.sim.measures import measure
from polluxd.sim.policies import POLICIES


def test_jobs_that_scale_perfectly_are_bounded_by_the_shortest_first():
    work = np.array([30.0, 10.0, 20.0])
    # 10, then 30, then 60 seconds.
    assert least_mean_of(np.zeros(3), work, work) == pytest.approx(100 / 3)


def test_a_shorter_job_that_arrives_later_interrupts_a_longer_one():
    released, work = np.array([0.0, 10.0]), np.array([100.0, 10.0])
    assert least_mean_of(released, work, work) == pytest.approx((110 + 10) / 2)


def test_jobs_that_do_not_scale_are_bounded_by_their_time_alone():
    assert least_mean_of(np.zeros(4), np.full(4, 1.0), np.full(4, 500.0)) == pytest.approx(500.0)


@pytest.mark.parametrize("seed", range(20))
def test_no_order_of_jobs_on_two_machines_is_below_the_bound(seed):
    rng = np.random.default_rng(seed)
    long = rng.uniform(1, 20, 5)
    released = rng.uniform(0, 20, 5)
    bound = least_mean_of(released, long / 2, long)
    means = []
    for order in permutations(range(5)):
        free, ended = [0.0, 0.0], np.zeros(5)
        for job in order:
            machine = int(np.argmin(free))
            ended[job] = free[machine] = max(free[machine], released[job]) + long[job]
        means.append(float(np.mean(ended - released)))
    assert bound <= min(means) + 1e-9
    assert bound >= 0.5 * min(means)


@pytest.mark.parametrize("policy", ["pollux", "tiresias"])
def test_no_policy_is_below_the_bound(policy):
    scenario = Scenario(nodes=2, restart_seconds=0.0)
    jobs = generate(BUILT_IN, 8, 0.5, cluster_gpus=8, seed=4)
    found = measure(simulate(jobs, BUILT_IN, POLICIES[policy](scenario), scenario), scenario)
    assert 0 < least_mean(jobs, BUILT_IN, scenario) <= found["avg_jct_s"]
