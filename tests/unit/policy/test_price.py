"""The price-based solver: its bound holds, and it meets the exact one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from polluxd.policy import counts, price


def instance(jobs, capacity, seed, options=12, noise=0.02):
    """Return options of jobs with falling returns, and a little noise.

    Having no GPUs is as bad as under p = -1.
    """
    rng = np.random.default_rng(seed)
    gpus, value, start = [], [], [0]
    largest = max(2, min(64, capacity))
    for _ in range(jobs):
        sizes = sorted(
            rng.choice(np.arange(1, largest), size=min(options, largest - 1), replace=False).tolist()
        )
        scaling, weight = rng.uniform(0.2, 1), rng.uniform(0.1, 2)
        gpus += [0, *sizes]
        value += [-1000.0, *(-1 / (weight * k**scaling + 1e-3) + rng.normal() * noise for k in sizes)]
        start.append(len(gpus))
    return np.array(gpus, dtype=np.int64), np.array(value), np.array(start)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(4))
def test_bound_holds_and_small_cores_are_exact(block):
    for seed in range(block * 50, block * 50 + 50):
        rng = random.Random(seed)
        capacity = rng.randint(0, 200)
        gpus, value, start = instance(rng.randint(1, 80), capacity, seed)
        found = price.solve(gpus, value, start, capacity)
        _, best = counts.solve(gpus, value, start, capacity)
        assert gpus[found.chosen].sum() <= capacity
        assert np.all((found.chosen >= start[:-1]) & (found.chosen < start[1:]))
        assert found.total == pytest.approx(value[found.chosen].sum())
        assert found.total <= best + 1e-9 * abs(best)
        assert found.bound >= best - 1e-9 * abs(best)
        assert found.total == pytest.approx(best)  # the core holds every job here


def test_no_choice_with_an_option_passes_what_the_option_reaches():
    for seed in range(20):
        gpus, value, start = instance(5, 12, seed, options=4)
        found = price.solve(gpus, value, start, 12)
        for option in range(gpus.size):
            j = int(np.searchsorted(start, option, side="right")) - 1
            forced = value.copy()
            forced[start[j] : start[j + 1]] = -np.inf
            forced[option] = value[option]
            allowed = np.flatnonzero(np.isfinite(forced))
            begin = np.searchsorted(allowed, start)
            # Every job has an option of no GPUs but this one: what it takes is taken off the capacity first.
            left = 12 - int(gpus[option])
            rest = np.where(allowed == option, 0, gpus[allowed])
            best = counts.solve(rest, forced[allowed], begin, left)[1] if left >= 0 else -np.inf
            assert best <= found.reach[option] + 1e-9 * abs(best)


@pytest.mark.parametrize(("jobs", "capacity"), [(300, 128), (300, 256), (300, 900)])
def test_larger_than_the_core_stays_within_a_tenth_of_a_percent(jobs, capacity):
    for seed in range(3):
        gpus, value, start = instance(jobs, capacity, seed)
        found = price.solve(gpus, value, start, capacity)
        _, best = counts.solve(gpus, value, start, capacity)
        assert abs(best - found.total) <= 1e-3 * abs(best)
        assert found.bound >= best - 1e-9 * abs(best)


def test_hull_is_concave_and_holds_every_supported_option():
    for seed in range(50):
        gpus, value, start = instance(5, 40, seed, noise=0.5)
        owner = counts.owners(start)
        on = price.hull(gpus, value, owner)
        for j in range(5):
            own, points = np.flatnonzero(owner == j), on[owner[on] == j]
            slopes = np.diff(value[points]) / np.diff(gpus[points])
            assert np.all(slopes > 0)
            assert np.all(np.diff(slopes) <= 1e-12)
            for cost in np.linspace(0, 2, 21):
                assert (value[points] - cost * gpus[points]).max() == pytest.approx(
                    (value[own] - cost * gpus[own]).max()
                )


def test_ten_thousand_identical_jobs_are_told_apart_by_order_alone():
    gpus = np.tile([0, 1, 2, 4], 10_000)
    value = np.tile([-1000.0, -4.0, -2.5, -1.5], 10_000)
    start = np.arange(0, 40_001, 4)
    found = price.solve(gpus, value, start, 12_000)
    assert gpus[found.chosen].sum() == 12_000
    assert np.all(gpus[found.chosen] >= 1)
    assert found.bound == pytest.approx(found.total, rel=1e-6)
    assert np.array_equal(found.chosen, price.solve(gpus, value, start, 12_000).chosen)


def test_nothing_to_solve_and_no_room():
    assert price.solve(np.zeros(0, np.int64), np.zeros(0), np.zeros(1, np.int64), 8).total == 0
    gpus, value, start = instance(5, 40, 1)
    assert gpus[price.solve(gpus, value, start, 0).chosen].sum() == 0


def test_a_choice_that_reaches_the_bound_only_in_the_core_is_proven():
    """One of 121 jobs can use the single GPU that pairs leave over."""
    gpus = np.append(np.tile([0, 2], 120), [0, 1])
    start = np.arange(0, 243, 2)
    found = price.solve(gpus, gpus.astype(np.float64), start, 201)
    assert (found.total, found.bound) == (201.0, 201.0)
    assert found.proven
