"""Powers, weights and remaining work.

The tests check which jobs are given more, and that no job is forgotten.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polluxd.model import JobSpec
from polluxd.policy import decide, worth
from tests.build import job, nodes, report, running, snapshot
from tests.unit.policy.invariants import check


@pytest.mark.parametrize(
    "weights",
    [
        {"account_weights": {"big": 4.0}},
        {"user_weights": {"eve": 4.0}},
        {"qos_weights": {"high": 4.0}},
        {"job_weights": {"1": 4.0}},
        {"account_weights": {"big": 8.0}, "qos_weights": {"high": 2.0}, "user_weights": {"ada": 4.0}},
    ],
)
def test_weights_shift_the_shares(weights):
    jobs = [
        job(1, report=report(), account="big", user="eve", qos="high"),
        job(2, report=report(), account="lab", user="ada", qos="normal"),
    ]
    even = decide(snapshot(nodes(4), jobs))
    uneven = decide(snapshot(nodes(4), jobs, **weights))
    assert uneven.of(1).explanation.weight == 4 * uneven.of(2).explanation.weight
    assert even.of(1).placement.gpus == even.of(2).placement.gpus == 8
    assert uneven.of(1).placement.gpus > uneven.of(2).placement.gpus > 0


@pytest.mark.parametrize("power", [1.0, 0.0, -1.0, -2.0, -10.0, -100.0, float("-inf")])
def test_every_power_gives_a_plan_and_low_powers_raise_the_worst_off(power):
    jobs = [job(n, report=report(kind)) for n, kind in enumerate(["scalable", "middling", "stubborn"] * 3, 1)]
    snap = snapshot(nodes(4), jobs, power=power)
    plan = decide(snap)
    check(snap, plan)
    worst = min(a.speedup for a in plan.allocations)
    best_worst = min(a.speedup for a in decide(snapshot(nodes(4), jobs, power=float("-inf"))).allocations)
    assert worst <= best_worst * (1 + 1e-9)
    if power < -5:
        assert worst >= 0.9 * best_worst


def test_starved_jobs_come_first_under_strongly_negative_powers():
    jobs = [running(1, ["n000", "n001"], 4, report=report()), *(job(n, report=report()) for n in range(2, 6))]
    plan = decide(snapshot(nodes(2), jobs, power=-10.0))
    assert all(a.placement for a in plan.allocations)


@pytest.mark.parametrize(
    ("capacity", "jobs", "spec", "share"),
    [
        (16, 3, JobSpec(), (2, 6)),
        (8, 0, JobSpec(), (2, 8)),
        (0, 3, JobSpec(), (1, 1)),
        (16, 2, JobSpec(max_gpus=3), (1, 3)),
        (2, 4, JobSpec(min_gpus=5), (2, 5)),
    ],
)
def test_the_fair_share_is_an_equal_part_within_the_jobs_own_limits(capacity, jobs, spec, share):
    assert worth.fair_share(capacity, jobs, 4, job(1, spec)) == share


@pytest.mark.parametrize("objective", ["completion-time", "fair-share"])
def test_a_wide_job_that_has_waited_long_comes_before_elastic_ones(objective):
    """Eight jobs can use any number of the 16 GPUs, and one needs them all."""
    elastic = [running(n, [f"n{n % 4:03d}"], 2, report=report()) for n in range(1, 9)]
    wide = job(9, spec=JobSpec(min_gpus=16, max_gpus=16), age=7200.0)
    plan = decide(snapshot(nodes(4), [*elastic, wide], objective=objective))
    assert plan.of(9).placement.gpus == 16
    plan = decide(snapshot(nodes(4), [*elastic, wide], objective=objective, waiting_power=0.0))
    assert not plan.of(9).placement
    fresh = replace(wide, age=60.0)
    plan = decide(snapshot(nodes(4), [*elastic, fresh], objective=objective))
    assert not plan.of(9).placement
    assert "has waited 1 min; next in line for 16 GPUs" in plan.of(9).reason


def test_slowdown_is_relative_to_the_job_s_own_length():
    waits = [
        replace(job(1), age=1200.0),
        replace(job(2), age=1200.0, time_limit=600.0),
        replace(job(3), age=1200.0, time_limit=1.0),
        replace(job(4), age=1200.0, time_limit=1e6),
        running(5, ("n1",), 1, age=1200.0),
        replace(job(6, report=replace(report(), target=1000.0, progress=500.0)), age=1200.0),
    ]
    fair = np.array([np.nan, np.nan, np.nan, np.nan, np.nan, report().limits.initial / 4.0])
    found = worth.slowdowns(waits, fair)
    assert found.tolist() == pytest.approx([2.0, 3.0, 5.0, 2.0, 1.0, 1.3])
