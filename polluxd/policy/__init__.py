"""Decide which job gets which GPUs.

The policy is a pure function from a snapshot to a plan. The daemon and the simulator share it.

    domains -> table (goodput, fair share, utility per option) -> counts (solver) -> placement -> reasons

Nothing here does I/O, reads a clock or draws a random number.
"""

from polluxd.policy.cloud.powered_down import decide
from polluxd.policy.listing import Cache

__all__ = ["Cache", "decide"]
