"""Random honest lives of jobs, by the real agent's reports: none is said to claim falsely.

`make bench-honesty` has 1,200, of up to six hours.
"""

from __future__ import annotations

import pytest

from polluxd.sim.applications import BUILT_IN
from tests.benchmarks.honesty import BEHAVIOURS, honest_life


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(len(BEHAVIOURS)))
def test_no_honest_life_is_doubted(seed: int) -> None:
    life = honest_life(seed, BUILT_IN, hours=1.5)
    assert life.doubts == ()
    # A job that stands still for twenty minutes gains no GPUs in this time.
    assert life.held_back_s < (2400 if "evaluations" in life.behaviour else 900)
