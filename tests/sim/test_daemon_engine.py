"""polluxd's own controller in virtual time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest

from polluxd.errors import ConfigError
from polluxd.sim.cluster import Cloud, Knowledge, NodeGroup, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.generator import generate
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.policies import POLICIES

DAEMON = Scenario(pollux=Knowledge(daemon=True))
LIGHT = Scenario()
SEEDS = (201, 202, 203, 204)


def run(jobs, apps, scenario):
    found = played(jobs, apps, POLICIES["pollux"](scenario), scenario)
    assert found.idle_seconds == 0.0, "polluxd's watch found idle GPUs beside a waiting job, without a reason"
    return found


def times(result):
    return [job.ended_at - job.submission.time for job in result.jobs]


@pytest.mark.slow
@pytest.mark.parametrize("moves", [None, MoveCosts()])
def test_the_light_engine_and_polluxd_itself_come_to_the_same_completion_times(apps, moves):
    changes = []
    for seed in SEEDS:
        jobs = generate(apps, 30, 3.0, cluster_gpus=64, seed=seed)
        light, daemon = (fmean(times(run(jobs, apps, replace(s, moves=moves)))) for s in (LIGHT, DAEMON))
        changes.append(daemon / light - 1.0)
    assert abs(fmean(changes)) <= 0.01, changes


def test_a_run_is_reproducible(apps, burst):
    scenario = replace(DAEMON, nodes=4)
    first, second = (run(burst, apps, scenario) for _ in range(2))
    assert times(first) == times(second)


def test_jobs_are_resized_in_place_at_the_cost_of_the_path(apps, burst):
    costs = MoveCosts(resize=0.7, requeue=9.0, start=4.0)
    found = run(burst, apps, replace(DAEMON, nodes=4, moves=costs))
    paths = Counter({path: len(s) for job in found.jobs for path, s in job.costs.items()})
    assert paths["resize"]
    assert {cost for job in found.jobs for cost in job.costs.get("resize", ())} == {0.7}


def test_jobs_live_through_failing_nodes(apps, burst):
    found = run(burst, apps, replace(DAEMON, nodes=4, moves=MoveCosts(), failures_per_day=200.0, seed=3))
    assert all(job.ended_at is not None for job in found.jobs)
    assert sum(times(found)) > sum(times(run(burst, apps, replace(DAEMON, nodes=4, moves=MoveCosts()))))


def test_gpu_types_racks_and_users(apps, burst):
    groups = (NodeGroup("t4", 2, 4), NodeGroup("a100", 2, 4))
    found = run(burst, apps, replace(DAEMON, groups=groups, nodes_per_rack=2, rack_slowdown=0.5, users=3))
    assert all(job.ended_at is not None for job in found.jobs)


def test_polluxd_rents_no_nodes(apps, burst):
    with pytest.raises(ConfigError, match="cloud"):
        run(burst, apps, replace(DAEMON, cloud=Cloud(2, 16)))
