"""polluxd's own controller in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from polluxd.config.settings import CycleSettings, PolicySettings
from polluxd.errors import ConfigError
from polluxd.sim.cluster import Cloud, NodeGroup, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.measures import measure
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.policies import POLICIES

PLAIN = Scenario()


def run(jobs, apps, scenario):
    found = played(jobs, apps, POLICIES["pollux"](scenario), scenario)
    assert found.idle_seconds == 0.0, "polluxd's watch found idle GPUs beside a waiting job, without a reason"
    return found


def times(result):
    return [job.ended_at - job.submission.time for job in result.jobs]


def test_times_are_those_of_the_configuration():
    cycle, policy = CycleSettings(), PolicySettings()
    assert (PLAIN.interval, PLAIN.floor, PLAIN.poll) == (cycle.interval_s, cycle.floor_s, cycle.poll_s)
    assert PLAIN.policy == policy


def test_a_run_is_reproducible(apps, burst):
    scenario = replace(PLAIN, nodes=4)
    first, second = (run(burst, apps, scenario) for _ in range(2))
    assert times(first) == times(second)


def test_jobs_are_resized_in_place_at_the_cost_of_the_path(apps, burst):
    costs = MoveCosts(resize=0.7, requeue=9.0, start=4.0)
    found = run(burst, apps, replace(PLAIN, nodes=4, moves=costs))
    paths = Counter({path: len(s) for job in found.jobs for path, s in job.costs.items()})
    assert paths["resize"]
    assert {cost for job in found.jobs for cost in job.costs.get("resize", ())} == {0.7}


def test_jobs_live_through_failing_nodes(apps, burst):
    found = run(burst, apps, replace(PLAIN, nodes=4, moves=MoveCosts(), failures_per_day=200.0, seed=3))
    assert all(job.ended_at is not None for job in found.jobs)
    assert sum(times(found)) > sum(times(run(burst, apps, replace(PLAIN, nodes=4, moves=MoveCosts()))))


def test_gpu_types_racks_and_users(apps, burst):
    groups = (NodeGroup("t4", 2, 4), NodeGroup("a100", 2, 4))
    found = run(burst, apps, replace(PLAIN, groups=groups, nodes_per_rack=2, rack_slowdown=0.5, users=3))
    assert all(job.ended_at is not None for job in found.jobs)


def rented(jobs, apps, *, value, budget=None, **cloud):
    jobs = jobs[::2]
    scenario = replace(
        PLAIN,
        nodes=8,
        cloud=Cloud(**{"least": 1, "most": 8, "price": 2.0, **cloud}),
        policy=PolicySettings(cloud_hour_value=value, cloud_month_budgets=budget or {}),
    )
    return measure(run(jobs, apps, scenario), scenario)


def test_rented_nodes_are_on_while_they_are_worth_their_price(apps, burst):
    worthless, free, limited = (
        rented(burst, apps, value=value, budget=budget)
        for value, budget in ((0.0, None), (50.0, None), (50.0, {"*": 3.0}))
    )
    assert worthless["node_hours"] == pytest.approx(worthless["makespan_s"] / 3600.0, rel=0.01), (
        "one own node"
    )
    assert free["cost"] == pytest.approx(2.0 * free["node_hours"])
    assert free["node_hours"] < 8 * free["makespan_s"] / 3600.0
    own = 2.0 * limited["makespan_s"] / 3600.0
    assert limited["cost"] - own <= 3.0 + 2.0 * 120.0 / 3600.0 < free["cost"] - own, "the budget holds"
    assert free["avg_jct_s"] < limited["avg_jct_s"] < worthless["avg_jct_s"]


def test_what_has_to_boot_is_not_there_at_once(apps, burst):
    quick, slow = (rented(burst, apps, value=50.0, boot_seconds=s)["avg_jct_s"] for s in (10.0, 600.0))
    assert slow > quick


def test_a_cluster_may_have_no_node_that_is_always_on(apps, burst):
    found = rented(burst, apps, value=50.0, least=0)
    assert 0 < found["node_hours"] < 8 * found["makespan_s"] / 3600.0
    assert found["jobs"]["job-0"] > 120.0, "the first node has to boot"
    with pytest.raises(ConfigError, match=r"cloud_hour_value is 0: expected what it is worth"):
        rented(burst, apps, value=0.0, least=0)
