"""The whole plan against every plan of a small cluster.

The clusters are small enough to try all plans. `make bench-policy` compares thousands more.
"""

from __future__ import annotations

import pytest

from tests.unit.policy.every_plan import compared, outside_the_gap, racked, small, two_types


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_plan_over_racks_lies_within_its_gap_of_the_best_there_is(block):
    found = compared(racked, range(block * 60, block * 60 + 60), solver="integer program")
    assert len(found) >= 10
    assert not outside_the_gap(found)
    short = [c.seed for c in found if c.shortfall > 1e-6]
    assert len(short) <= 0.05 * len(found), short


@pytest.mark.slow
@pytest.mark.parametrize("block", range(3))
def test_plan_over_two_gpu_types_lies_within_its_gap_of_the_best_there_is(block):
    found = compared(two_types, range(block * 80, block * 80 + 80), solver="integer program")
    assert len(found) >= 10
    assert not outside_the_gap(found)
    short = [c.seed for c in found if c.shortfall > 1e-6]
    assert len(short) <= 0.05 * len(found), short


@pytest.mark.slow
@pytest.mark.parametrize("block", range(5))
def test_plan_lies_within_its_gap_of_the_best_there_is(block):
    found = compared(small, range(block * 80, block * 80 + 80))
    assert len(found) >= 10
    assert not outside_the_gap(found)
    assert sum(c.shortfall > 1e-6 for c in found) <= 0.05 * len(found)
