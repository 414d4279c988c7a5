"""Prices against the integer optimum, spaced counts, limits in words."""

from __future__ import annotations

import itertools

import pytest

from pollux.goodput import BatchLimits
from polluxd.model import JobSpec
from polluxd.policy import counts, decide, price
from polluxd.policy.shapes import spaced
from tests.build import nodes, report, running, snapshot
from tests.unit.policy.count_instances import integer_optimum, rough
from tests.unit.policy.programs import by_prices


@pytest.mark.parametrize("jobs", [50, 75, 120])
@pytest.mark.parametrize("share", [0.6, 1.5, 4.0])
def test_prices_end_within_a_percent_of_the_integer_optimum(jobs, share):
    gpus, value, start = rough(jobs, jobs)
    capacity = int(share * jobs)
    best = integer_optimum(gpus, value, start, capacity)
    found = price.solve(gpus, value, start, capacity)
    assert int(gpus[found.chosen].sum()) <= capacity
    assert found.total <= best + 1e-6 * abs(best)
    assert found.total >= best - 0.01 * abs(best)
    assert found.bound >= best - 1e-6 * abs(best)
    exact, total = counts.solve(gpus, value, start, capacity)
    assert int(gpus[exact].sum()) <= capacity
    assert total == pytest.approx(best, rel=1e-6)


def test_prices_alone_end_within_a_percent_as_well(monkeypatch):
    by_prices(monkeypatch)
    for jobs in (50, 100):
        gpus, value, start = rough(jobs, jobs + 1)
        best = integer_optimum(gpus, value, start, 2 * jobs)
        found = price.solve(gpus, value, start, 2 * jobs)
        assert not found.proven or found.total == pytest.approx(best, rel=1e-6)
        assert found.total >= best - 0.01 * abs(best)


def test_node_counts_are_dense_at_first_and_an_eighth_apart_beyond():
    for most in (1, 2, 15, 16, 17, 100, 4_096):
        found = spaced(most)
        assert found == sorted(set(found))
        assert found[-1:] == ([most] if most >= 2 else [])
        assert found[:15] == list(range(2, min(most, 16) + 1))
        assert all(b <= a + max(a // 8, 1) for a, b in itertools.pairwise(found))
    assert len(spaced(4_096)) < 70


@pytest.mark.parametrize(
    ("spec", "held", "limit", "words"),
    [
        (JobSpec(max_gpus=2), 2, "max-gpus", "max-gpus=2 allows no more"),
        (
            JobSpec(max_gpus=7),
            4,
            "max-gpus",
            "no placement of 5 to 7 GPUs is possible, and max-gpus=7 allows no more",
        ),
        (
            JobSpec(max_gpus=5),
            4,
            "max-gpus",
            "no placement of 5 GPUs is possible, and max-gpus=5 allows no more",
        ),
        (
            JobSpec(gpu_counts="1,2"),
            2,
            "counts",
            "no placement of more than 2 GPUs has a count that gpu-counts allows",
        ),
        (JobSpec(), 8, "nodes", "no placement of more than 8 GPUs is possible on the nodes in service"),
        (JobSpec(mem_per_gpu_mb=9), 8, "nodes", "more than 8 GPUs with 9 MB of memory each is possible"),
    ],
)
def test_a_limit_of_the_job_s_own_is_told_as_it_is(spec, held, limit, words):
    names = ["n000"] if held <= 4 else ["n000", "n001"]
    found = report(limits=BatchLimits(64, 64 * 256, 1, 512))
    plan = decide(snapshot(nodes(2), [running(1, names, held // len(names), spec, report=found, age=1e6)]))
    assert plan.of(1).placement.gpus == held
    assert plan.of(1).explanation.limit == limit
    assert words in plan.of(1).reason
