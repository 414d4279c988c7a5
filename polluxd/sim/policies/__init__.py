"""The scheduling policies that the simulator compares, by the names that the command line takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import Policy
from polluxd.sim.policies.optimus import Optimus
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.policies.pollux_paper import PolluxPaper
from polluxd.sim.policies.tiresias import Tiresias

POLICIES: Mapping[str, Callable[[Scenario], Policy]] = {
    "pollux": lambda scenario: Pollux(scenario.power),
    "pollux-paper": lambda scenario: PolluxPaper(scenario.power),
    "tiresias": lambda _scenario: Tiresias(),
    "optimus": lambda _scenario: Optimus(),
}
"""Each makes a fresh policy for one run."""
