"""Agents know what they measured, and what earlier runs left; nothing else."""

from __future__ import annotations

import pytest

from polluxd.sim.agent import Agent, Memory
from polluxd.sim.applications import BUILT_IN

APP = BUILT_IN["vision-small"]


def run(agent, *places, batch=64):
    for place in places:
        agent.measure(len(place), sum(place), batch, *APP.times(place, batch), APP.noise(batch, 0), 0)


def test_an_agent_knows_nothing_before_it_measured():
    agent = Agent(APP.limits)
    assert agent.params is None
    assert agent.choose(1, 1) == (0, 0)
    run(agent, (1,))
    assert agent.params is not None
    assert agent.explored_gpus == 1
    assert agent.params.alpha_local < 1e-6, "unmeasured terms stay at their optimistic bound"


def test_what_one_run_measured_the_next_one_knows():
    memory = Memory()
    run(Agent(APP.limits, memory=memory), (1,), (2,), (4,), (4, 4))
    fresh = Agent(APP.limits, memory=memory)
    assert fresh.params is not None
    assert fresh.params.alpha_node == pytest.approx(APP.theta.alpha_node, rel=0.5)
    assert (memory.explored_gpus, memory.explored_nodes) == (8, 2)
    assert Agent(APP.limits).params is None


def test_jitter_is_the_job_s_own_and_reproducible():
    def theta(name, seed=1):
        agent = Agent(APP.limits, name=name, seed=seed, jitter=0.1)
        run(agent, (1,), batch=64)
        return agent.params

    assert theta("a") == theta("a")
    assert len({theta("a"), theta("b"), theta("a", seed=2)}) == 3


def test_a_measurement_that_the_fit_foretells_changes_nothing():
    agent = Agent(APP.limits)
    for batch in (32, 64, 128):
        run(agent, (1,), batch=batch)
    before = agent.params
    run(agent, (1,), batch=256)
    assert agent.params is before
