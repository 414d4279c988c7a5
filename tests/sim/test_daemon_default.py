"""Policy `pollux` is what the daemon runs: its defaults are the daemon's."""

from __future__ import annotations

from dataclasses import fields

from polluxd.config.settings import CycleSettings, MoveSettings, PolicySettings
from polluxd.sim.cluster import Knowledge, Scenario
from polluxd.sim.policies.pollux import UNMEASURED_COST, UNMEASURED_RESIZE_COST, Pollux


def test_settings_are_those_of_a_fresh_installation():
    assert Pollux().settings == PolicySettings()
    assert {f.name for f in fields(Knowledge)} >= {"remaining_work_power", "hysteresis", "cooldown"}


def test_times_are_those_of_the_configuration():
    scenario, cycle, moves = Scenario(), CycleSettings(), MoveSettings()
    assert (scenario.interval, scenario.floor, scenario.poll) == (
        cycle.interval_s,
        cycle.floor_s,
        cycle.poll_s,
    )
    assert Knowledge().cooldown == moves.cooldown_s
    assert (moves.default_cost_s, moves.default_resize_cost_s) == (UNMEASURED_COST, UNMEASURED_RESIZE_COST)
