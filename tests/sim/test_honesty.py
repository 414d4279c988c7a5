"""Random honest lives of jobs: none is doubted.

`make bench-honesty` has 10,000.
"""

from __future__ import annotations

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import simulate
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.policy_knowledge import Knowledge
from tests.benchmarks.honesty import honest_life


def test_no_honest_life_is_doubted() -> None:
    lives = [honest_life(seed, BUILT_IN, {}) for seed in range(80)]
    assert [(seed, life.doubts) for seed, life in enumerate(lives) if life.doubts] == []
    assert sum(life.moves for life in lives) > 300, "the jobs were moved"


def test_the_daemon_s_checks_change_nothing_for_honest_simulated_jobs(apps, burst) -> None:
    scenario = Scenario(nodes=4)
    ends = []
    for checks in (False, True):
        policy = Pollux(knowledge=Knowledge(checks_reports=checks))
        ends.append([job.ended_at for job in simulate(burst, apps, policy, scenario).jobs])
    assert ends[0] == ends[1]
