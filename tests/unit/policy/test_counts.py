"""The count solver against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from polluxd.policy.counts import frontiers, solve
from tests.unit.policy.count_instances import best_plain, flat, plain


@pytest.mark.parametrize("block", range(10))
def test_counts_equal_brute_force_on_random_instances(block):
    for seed in range(block * 200, block * 200 + 200):
        table, capacity = plain(seed)
        gpus, value, start = flat(table)
        chosen, total = solve(gpus, value, start, capacity)
        best = best_plain(table, capacity)
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


def test_frontiers_drop_what_is_no_better_and_tell_jobs_apart():
    gpus, value = np.array([0, 4, 2, 3, 4, 0, 1, 1]), np.array([0.0, 2.0, 1.0, 0.5, 3.0, -1.0, -2.0, 4.0])
    owner = np.array([0, 0, 0, 0, 0, 1, 1, 1])
    assert frontiers(gpus, value, owner).tolist() == [0, 2, 4, 5, 7]
    assert frontiers(gpus[:0], value[:0], owner[:0]).size == 0


def test_frontiers_are_what_comparing_every_pair_leaves():
    rng = np.random.default_rng(1)
    for _ in range(200):
        many = int(rng.integers(1, 30))
        gpus, value, owner = (rng.integers(0, top, many) for top in (6, 8, 4))
        better = (owner == owner[:, None]) & (gpus <= gpus[:, None]) & (value >= value[:, None])
        first = np.arange(many) < np.arange(many)[:, None]
        same = (gpus == gpus[:, None]) & (value == value[:, None])
        beaten = (better & (~same | first)).any(axis=1)
        kept = frontiers(gpus, value.astype(float), owner)
        assert sorted(kept.tolist()) == np.flatnonzero(~beaten).tolist()
        assert np.all(np.diff(owner[kept] * 100 + gpus[kept]) > 0)
