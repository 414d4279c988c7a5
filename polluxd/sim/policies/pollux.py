"""Policy `pollux`: polluxd itself. `polluxd.sim.daemon_engine` runs its controller; here is what its jobs' agents do.

It decides on what a real daemon would know. Beyond the paper's Pollux, that is:

    - each job's own measured restart cost
    - from the first start on, per GPU type, the fit that earlier runs of the same application left in the database
      (`polluxd.sim.agent.Memory`: it begins empty, and a fit is off by 5 % from one run to the next)
    - the training length that users declare, so that remaining work weighs
    - arrivals and ends of jobs, when they happen
"""

from __future__ import annotations

from polluxd.config.settings import GatewaySettings
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import Agents


class Pollux(Agents):
    """What agents do under polluxd."""

    chooses_batch = True
    seconds_between_fits = GatewaySettings().publish_interval_s

    def __init__(self, scenario: Scenario) -> None:
        self.remembers = scenario.pollux.remembers
