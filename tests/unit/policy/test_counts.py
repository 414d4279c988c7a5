"""The count solver against brute force."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from polluxd.policy.counts import frontier, solve


def instance(rng):
    """Options per job: (GPUs, value), the first of them nothing."""
    menu = []
    for _ in range(rng.randint(1, 5)):
        none = (0, rng.choice([-1000.0, -1.0, 0.0]))
        sizes = rng.sample(range(1, 9), rng.randint(0, 4))
        menu.append([none, *((k, rng.choice([rng.uniform(-5, 5), 1.0])) for k in sizes)])
    return menu, rng.randint(0, 16)


def flat(menu):
    start = np.cumsum([0, *(len(options) for options in menu)])
    gpus = np.array([k for options in menu for k, _ in options], dtype=np.int64)
    value = np.array([v for options in menu for _, v in options])
    return gpus, value, start


@pytest.mark.parametrize("block", range(10))
def test_counts_equal_brute_force_on_random_instances(block):
    for seed in range(block * 200, block * 200 + 200):
        menu, capacity = instance(random.Random(seed))
        gpus, value, start = flat(menu)
        chosen, total = solve(gpus, value, start, capacity)
        best = max(
            sum(v for _, v in pick)
            for pick in itertools.product(*menu)
            if sum(k for k, _ in pick) <= capacity
        )
        assert total == pytest.approx(best)
        assert value[chosen].sum() == pytest.approx(best)
        assert gpus[chosen].sum() <= capacity
        assert np.all((chosen >= start[:-1]) & (chosen < start[1:]))


def test_nothing_to_solve():
    chosen, total = solve(np.zeros(0, np.int64), np.zeros(0), np.zeros(1, np.int64), 8)
    assert chosen.size == 0
    assert total == 0


def test_equal_value_takes_fewer_gpus():
    gpus, value, start = flat([[(0, 0.0), (4, 1.0), (2, 1.0)]])
    chosen, _ = solve(gpus, value, start, 8)
    assert gpus[chosen] == [2]


def test_frontier_drops_what_is_no_better():
    assert frontier(np.array([0, 4, 2, 3, 4]), np.array([0.0, 2.0, 1.0, 0.5, 3.0])).tolist() == [0, 2, 4]
