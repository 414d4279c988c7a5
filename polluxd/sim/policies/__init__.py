"""The scheduling policies that the simulator compares, by the names that the command line takes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping

from polluxd.errors import ConfigError
from polluxd.sim.cluster import Scenario
from polluxd.sim.engine import Policy
from polluxd.sim.policies.antman import AntMan
from polluxd.sim.policies.gandiva import Gandiva
from polluxd.sim.policies.gavel import Gavel
from polluxd.sim.policies.lucid import Lucid
from polluxd.sim.policies.optimus import Optimus
from polluxd.sim.policies.plain import Plain
from polluxd.sim.policies.pollux import Pollux
from polluxd.sim.policies.pollux_paper import PolluxPaper
from polluxd.sim.policies.shockwave import Shockwave
from polluxd.sim.policies.sia import Sia
from polluxd.sim.policies.slaq import Slaq
from polluxd.sim.policies.themis import Themis
from polluxd.sim.policies.tiresias import Tiresias

POLICIES: Mapping[str, Callable[[Scenario], Policy | Pollux]] = {
    "pollux": Pollux,
    "pollux-paper": PolluxPaper,
    "tiresias": lambda _scenario: Tiresias(),
    "optimus": lambda _scenario: Optimus(),
    "gandiva": lambda _scenario: Gandiva(),
    "slaq": lambda _scenario: Slaq(),
    "gavel": lambda _scenario: Gavel(),
    "antman": lambda _scenario: AntMan(),
    "themis": lambda _scenario: Themis(),
    "shockwave": lambda _scenario: Shockwave(),
    "lucid": lambda _scenario: Lucid(),
    "sia": lambda _scenario: Sia(),
    "fifo": lambda _scenario: Plain(backfills=False),
    "backfill": lambda _scenario: Plain(backfills=True),
    "fairshare": lambda _scenario: Plain(backfills=True, shares=True),
}
"""Each makes a fresh policy for one run."""


def policy_named(name: str) -> Callable[[Scenario], Policy | Pollux]:
    """Return what makes the policy of this name, or `MODULE:CLASS` of the working folder or of an installed package.

    Raises ConfigError where there is none.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"--policy {name}: no such policy; there are {', '.join(POLICIES)}, all, and your own as MODULE:CLASS"
        )
    if "" not in sys.path:
        sys.path.append("")
    try:
        made = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"--policy {name}: {error}; expected MODULE:CLASS, as in least_attained:LeastAttained"
        ) from None
    if not callable(getattr(made, "decide", None)):
        raise ConfigError(f"--policy {name}: {attribute} has no method decide(view)")
    return lambda _scenario: made()
