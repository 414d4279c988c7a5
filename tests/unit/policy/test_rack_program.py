"""The integer program over racks: its bound and its cuts.

The bound is compared with every way to put nodes into racks.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from polluxd.policy import integer


def partitions(total, most):
    """All ways to write `total` as a sum of parts up to `most`, largest first."""
    if total == 0:
        yield []
    for first in range(min(total, most), 0, -1):
        for rest in partitions(total - first, first):
            yield [first, *rest]


@pytest.mark.parametrize("k", [*integer.CUTS, 5])
def test_whatever_fits_into_a_rack_passes_every_cut(k):
    for nodes in range(1, 13):
        for used in range(1, nodes + 1):
            for parts in partitions(used, used):
                shares = np.array(parts, dtype=np.float64) / nodes
                assert integer.dual_feasible(shares, k).sum() <= 1 + 1e-9, (nodes, parts)


def test_a_cut_sees_that_two_racks_of_three_hold_no_three_pairs():
    pair = integer.dual_feasible(np.array([2 / 3]), 1)[0]
    assert 3 * pair > 2 >= 2 * pair


def fits(within, over, racks):
    """Return whether the racks have room for all jobs.

    `within` holds the nodes of each job that stays within one rack. `over` is the total of nodes over racks.
    """
    if not within:
        return sum(racks) >= over
    first, *rest = within
    return any(
        fits(rest, over, [r - first if i == n else r for i, r in enumerate(racks)])
        for n, room in enumerate(racks)
        if room >= first and room not in racks[:n]
    )


def instance(seed):
    """Return options of a few jobs, and the sizes of two or three racks.

    An option has 1 to 4 nodes of 4 GPUs, within a rack or over several.
    """
    rng = np.random.default_rng(seed)
    nodes, value, within, start = [], [], [], [0]
    for _ in range(int(rng.integers(2, 6))):
        speed, worse = rng.uniform(0.5, 2), rng.uniform(0.3, 1)
        nodes, value, within = [*nodes, 0], [*value, -10.0], [*within, False]
        for size in range(1, 5):
            nodes, within = [*nodes, size], [*within, size > 1]
            value = [*value, -1 / (speed * size**0.8)]
            if size > 1:
                nodes, within = [*nodes, size], [*within, False]
                value = [*value, -1 / (speed * worse * size**0.8)]
        start.append(len(nodes))
    racks = rng.choice([1, 2, 3, 3, 4], int(rng.integers(2, 4))).tolist()
    return np.array(nodes), np.array(value), np.array(within), np.array(start), racks


def best(nodes, value, within, start, racks):
    found = -np.inf
    for picked in itertools.product(*(range(a, b) for a, b in itertools.pairwise(start.tolist()))):
        chosen = np.array(picked)
        inside = sorted(nodes[chosen][within[chosen]].tolist(), reverse=True)
        total = float(value[chosen].sum())
        if total > found and fits(inside, int(nodes[chosen][~within[chosen]].sum()), racks):
            found = total
    return found


def test_bound_over_racks_holds_and_is_nearly_always_reached():
    reached = tried = 0
    for seed in range(40):
        nodes, value, within, start, racks = instance(seed)
        if start.size > 5:
            continue
        sizes, many = np.unique(np.array(racks), return_counts=True)
        spans = np.where(nodes > 1, nodes, 0)
        given = integer.Racks(within, spans, (4 * sizes * many)[None, :], sizes[None, :], many)
        pools = integer.Pools(np.where(nodes > 0, 0, -1), [4 * sum(racks)], given)
        found = integer.solve(4 * nodes, value, start, pools, [])
        truth = best(nodes, value, within, start, racks)
        tried += 1
        assert found.bound >= truth - 1e-9, seed
        reached += found.total <= truth + 1e-6
    assert tried >= 20
    assert reached >= 0.9 * tried
