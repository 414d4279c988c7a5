"""Agents know only their own measurements and what earlier runs left."""

from __future__ import annotations

import pytest

from polluxd.sim.agent import Agent, Memory
from polluxd.sim.applications import BUILT_IN

APP = BUILT_IN["vision-small"]


def run(agent, *places, batch=64):
    for place in places:
        agent.measure(len(place), sum(place), batch, *APP.times(place, batch), APP.noise(batch, 0))


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
    first = Agent(APP.limits, memory=memory)
    run(first, (1,), (2,), (4,), (4, 4))
    assert first.params is not None
    fresh = Agent(APP.limits, memory=memory)
    assert fresh.params is None, "not before it has started and asked"
    fresh.begin()
    assert fresh.params is not None
    assert fresh.params != first.params, "no run is like another"
    assert fresh.params.alpha_node == pytest.approx(APP.theta.alpha_node, rel=0.5)
    assert (fresh.prior_gpus, fresh.prior_nodes, fresh.explored_gpus) == (8, 2, 0)
    other = Agent(APP.limits)
    other.begin()
    assert other.params is None


def test_the_run_that_saw_most_is_the_one_remembered():
    memory = Memory()
    for places in (((1,), (4, 4)), ((1,), (2,))):
        agent = Agent(APP.limits, memory=memory)
        run(agent, *places)
        assert agent.params is not None
    assert memory.fits()[""].gpus == 8


def test_gpu_types_are_told_apart_and_unmeasured_ones_not_known():
    agent = Agent(APP.limits)
    agent.begin("t4")
    place = (1,)
    agent.measure(1, 1, 64, *APP.times(place, 64), APP.noise(64, 0), "t4")
    assert agent.known_on("a100") is None
    fast = APP.on("a100")
    agent.measure(1, 1, 64, *fast.times(place, 64), APP.noise(64, 0), "a100")
    found = agent.by_type()
    assert set(found) == {"t4", "a100"}
    assert found["t4"].beta_grad > 2 * found["a100"].beta_grad


def test_fits_are_renewed_no_more_often_than_agents_publish():
    agent = Agent(APP.limits, seconds_apart=30.0)
    run(agent, (1,))
    first = agent.params
    run(agent, (2,), (4, 4))
    agent.now = 29.0
    assert agent.params is first
    agent.now = 30.0
    assert agent.params != first


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
