"""The engine runs every policy over a trace to its end.

The results are the same each time, and within the cluster's bounds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from polluxd.sim.cluster import Scenario
from polluxd.sim.comparison import compare, played
from polluxd.sim.measures import Alone, contention, measure
from polluxd.sim.policies import POLICIES
from polluxd.sim.workload import Submission

SMALL = Scenario(nodes=4)


def figures(run, scenario):
    found = measure(run, scenario)
    return {key: found[key] for key in found if key not in ("decision_ms", "timeline")}


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_ends_every_job_alike_each_time(name, burst, apps):
    first, second = (played(burst, apps, POLICIES[name](SMALL), SMALL) for _ in range(2))
    assert all(job.ended_at > job.submission.time for job in first.jobs)
    assert figures(first, SMALL) == figures(second, SMALL)
    assert max(moment.gpus for moment in first.moments) <= SMALL.gpus


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_failures_noise_and_long_restarts_only_cost_time(name, burst, apps):
    rough = replace(SMALL, failures_per_day=60.0, jitter=0.1, restarts={"speech": 250.0}, seed=3)
    run = played(burst, apps, POLICIES[name](rough), rough)
    assert all(job.ended_at is not None for job in run.jobs)


def test_one_job_alone_takes_its_work_and_its_start(apps):
    app = apps["speech"]
    job = Submission("only", 0.0, "speech", 1, app.limits.initial)
    run = played([job], apps, POLICIES["tiresias"](SMALL), SMALL)
    step, _ = app.times((1,), app.limits.initial)
    expected = 60.0 + 30.0 + app.progress(app.epochs) * step
    assert run.jobs[0].ended_at == pytest.approx(expected)
    assert run.jobs[0].restarts == 0


def test_parallel_runs_give_the_same_figures(burst):
    names = ["tiresias", "optimus"]
    alone, beside = (compare(burst[:4], None, names, SMALL, in_parallel=n) for n in (1, 2))
    for name in names:
        for results in (alone, beside):
            results[name].pop("decision_ms")
        assert alone[name] == beside[name]


def test_contention_counts_the_jobs_in_the_system_over_each_life():
    found = contention(np.array([0.0, 0.0, 5.0]), np.array([10.0, 5.0, 10.0]))
    assert found == pytest.approx([2.0, 2.0, 2.0])
    assert contention(np.array([0.0, 100.0]), np.array([10.0, 110.0])) == pytest.approx([1.0, 1.0])


def test_time_alone_falls_with_the_share_and_slices_below_one_gpu(apps):
    alone = Alone(apps["vision-small"], 4)
    times = [alone.on(share) for share in (0.5, 1, 1.5, 2, 4, 8, 64)]
    assert times == sorted(times, reverse=True)
    assert times[0] == pytest.approx(2 * times[1])
