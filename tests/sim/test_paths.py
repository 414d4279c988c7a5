"""Simulated jobs move by the product's rules; declared lengths may lie."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.model import NO_PLACEMENT, Placement
from polluxd.sim.cluster import LENGTHS, Scenario
from polluxd.sim.comparison import played
from polluxd.sim.move_costs import HeldNodes, MoveCosts
from polluxd.sim.policies import POLICIES
from polluxd.sim.workload import Submission

ONE, TWO = Placement(("n0",), 4), Placement(("n0", "n1"), 4)
THREE = Placement(("n0", "n1", "n2"), 4)


def test_nodes_come_and_go_in_place_and_anything_else_is_a_requeue():
    job = HeldNodes()
    assert job.move(NO_PLACEMENT, ONE) == "start"
    assert job.move(ONE, TWO) == "resize"
    assert job.move(TWO, THREE) == "resize"
    assert job.keeps == ("n0", "n1", "n2")
    assert job.move(THREE, TWO) == "resize"
    assert job.move(TWO, Placement(("n0", "n1"), 2)) == "requeue"
    assert job.move(Placement(("n0", "n1"), 2), Placement(("n1",), 2)) == "requeue"
    assert job.move(Placement(("n1",), 2), NO_PLACEMENT) == "park"
    assert job.keeps == ()


def test_a_companion_gives_back_all_its_nodes_or_the_job_is_requeued():
    job = HeldNodes()
    job.move(NO_PLACEMENT, ONE)
    job.move(ONE, THREE)
    assert job.move(THREE, TWO) == "requeue"


@pytest.mark.parametrize("objective", ["completion-time", "fair-share"])
def test_jobs_resize_in_place_and_lose_less_than_by_restarts(burst, apps, objective):
    flat = Scenario(nodes=4, policy=PolicySettings(objective=objective))
    paths = replace(flat, moves=MoveCosts())
    slow, fast = (played(burst, apps, POLICIES["pollux"](s), s) for s in (flat, paths))
    taken = {path for job in fast.jobs for path in job.costs}
    assert {"resize", "requeue"} <= taken
    assert sum(j.lost_seconds for j in fast.jobs) < 0.3 * sum(j.lost_seconds for j in slow.jobs)
    assert sum(j.ended_at - j.submission.time for j in fast.jobs) < sum(
        j.ended_at - j.submission.time for j in slow.jobs
    )


def test_declared_lengths_may_be_wrong_missing_or_lies():
    names = [f"job-{i}" for i in range(200)]

    def declared(lengths):
        return [Scenario(lengths=lengths).declared(name) for name in names]

    assert declared("true") == [1.0] * 200
    assert declared("none") == [None] * 200
    assert 0.3 <= min(declared("wrong")) < 0.4
    assert 2.5 < max(declared("wrong")) <= 3.0
    assert 60 < declared("missing").count(None) < 140
    assert 25 < declared("lies").count(0.1) < 80
    assert all(ratio >= 1.0 for ratio in declared("early"))


@pytest.mark.parametrize("lengths", sorted(LENGTHS))
def test_whatever_users_declare_every_job_ends(apps, lengths):
    scenario = Scenario(nodes=2, lengths=lengths)
    jobs = [Submission(f"job-{i}", 30.0 * i, "speech", 1, 80, 0.3) for i in range(6)]
    run = played(jobs, apps, POLICIES["pollux"](scenario), scenario)
    assert all(job.ended_at is not None for job in run.jobs)
