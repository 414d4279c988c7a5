"""Scenario files: every key reaches the scenario, every fault is named."""

from __future__ import annotations

import math
import tomllib

import pytest

from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError
from polluxd.sim.cluster import Cloud, Knowledge, NodeGroup, Scenario
from polluxd.sim.generator import Trace
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.scenario_file import parse_scenario, read_scenario

WHOLE = """
interval = 4
restarts = { speech = 80 }
jitter = 0.1
noise_jitter = 0.2
lengths = "lies"
users = 3
failures_per_day = 2
repair_seconds = 60
nodes_per_rack = 2
rack_slowdown = 0.5
groups = [
  { gpu_type = "a100", nodes = 4, gpus_per_node = 8 },
  { gpu_type = "t4", nodes = 2, gpus_per_node = 4, speed = 0.5 },
]
[trace]
hours = 2
sweep = 4
length = 0.5
most_jobs = 9
[pollux]
remembers = false
[policy]
power = -inf
kappa = 5.0
start_gpus = 2
user_weights = { user-1 = 2.0 }
[moves]
requeue = 12.5
[cloud]
least = 1
most = 6
price = 2
"""


def test_a_file_says_what_the_scenario_is(tmp_path):
    path = tmp_path / "scenario.toml"
    path.write_text(WHOLE)
    assert read_scenario(path, {"seed": 3, "policy": {"objective": "fair-share"}, "nodes": None}) == Scenario(
        nodes=6,
        interval=4.0,
        floor=4.0,
        poll=4.0,
        restarts={"speech": 80.0},
        jitter=0.1,
        noise_jitter=0.2,
        lengths="lies",
        users=3,
        failures_per_day=2.0,
        repair_seconds=60.0,
        nodes_per_rack=2,
        rack_slowdown=0.5,
        groups=(NodeGroup("a100", 4, 8), NodeGroup("t4", 2, 4, 0.5)),
        trace=Trace(hours=2.0, sweep=4, length=0.5, most_jobs=9),
        pollux=Knowledge(remembers=False),
        policy=PolicySettings(
            objective="fair-share", power=-math.inf, kappa=5.0, start_gpus=2, user_weights={"user-1": 2.0}
        ),
        moves=MoveCosts(requeue=12.5),
        cloud=Cloud(1, 6, price=2.0),
        seed=3,
    )


def test_without_a_file_all_is_as_declared_and_options_win_over_a_file(tmp_path):
    assert read_scenario(None, {"nodes": None, "policy": {"objective": None}}) == Scenario()
    path = tmp_path / "scenario.toml"
    path.write_text("nodes = 3\n[policy]\nobjective = 'fair-share'\nkappa = 3\n")
    found = read_scenario(path, {"nodes": 5, "policy": {"objective": "completion-time"}})
    assert found == Scenario(nodes=5, policy=PolicySettings(kappa=3.0))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("nodes = '3'", r"nodes: the value should be a valid integer, got '3'"),
        ("nodes = 0", r"nodes: .*greater than or equal to 1, got 0"),
        ("speed = 1", r"speed: no such key"),
        ("pollux = 3", r"pollux: the value should be a table, got 3"),
        ("pollux.speed = 1", r"pollux.speed: no such key"),
        ("policy.objective = 'speed'", r"policy.objective: .*'completion-time', got 'speed'"),
        ("lengths = 'long'", r"lengths: .*'lies' or 'early', got 'long'"),
        ("policy.power = 2", r"policy.power: .*less than or equal to 1, got 2"),
        ("restarts = { speech = -1 }", r"restarts.speech: .*greater than or equal to 0"),
        ("interval = inf", r"interval: .*finite"),
        ("moves.requeue = -1", r"moves.requeue: .*got -1"),
        ("moves.requeue = true", r"moves.requeue: .*got True"),
        ("moves.requeue = nan", r"moves.requeue: .*got nan"),
        ("moves.teleport = 1", r"moves.teleport: no such key"),
        ("groups = [{ gpu_type = 't4' }]", r"groups.0.nodes: missing"),
        ("groups = [{ gpu_type = '', nodes = 1, gpus_per_node = 1 }]", r"groups.0.gpu_type"),
        ("cloud = { least = 4, most = 2 }", r"least \(4\) must not be above most \(2\)"),
        ("cloud = { least = -1, most = 2 }", r"cloud.least: .*got -1"),
        ("policy.paused = true", r"policy.paused: no job would ever start"),
        ("policy.cloud_prices = { x = 1 }", r"policy.cloud_prices: expected .* as cloud.price"),
        ("policy = { user_guarantees = { a = 2 }, user_ceilings = { a = 1 } }", r"policy.user_guarantees.a"),
        (
            "cloud = { least = 1, most = 2 }\n[[groups]]\ngpu_type='t4'\nnodes=3\ngpus_per_node=4",
            r"cloud.most is 2: expected 3",
        ),
        ("seed = 2026-01-01", r"seed: "),
    ],
)
def test_a_fault_is_named_by_key_and_value(text, fault):
    with pytest.raises(ConfigError, match=f"^scenario.toml: .*{fault}"):
        parse_scenario(tomllib.loads(text), "scenario.toml")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none.toml: cannot be read .*; check the path"):
        read_scenario(tmp_path / "none.toml", {})
    (tmp_path / "bad.toml").write_text("nodes")
    with pytest.raises(ConfigError, match=r"bad.toml: not TOML"):
        read_scenario(tmp_path / "bad.toml", {})
