"""Random honest lives of jobs: none is doubted.

`make bench-honesty` has 10,000.
"""

from __future__ import annotations

from polluxd.sim.applications import BUILT_IN
from tests.benchmarks.honesty import honest_life


def test_no_honest_life_is_doubted() -> None:
    lives = [honest_life(seed, BUILT_IN, {}) for seed in range(80)]
    assert [(seed, life.doubts) for seed, life in enumerate(lives) if life.doubts] == []
    assert max(life.held_back_s for life in lives) < 900, "a job waits for three rates of its place at most"
    assert sum(life.moves for life in lives) > 300, "the jobs were moved"
