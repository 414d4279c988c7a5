"""The policy: which job gets which GPUs. A pure function from a snapshot to a plan, shared by daemon and simulator.

    domains -> table (goodput, fair share, utility per option) -> counts (solver) -> placement -> reasons

Nothing here does I/O, reads a clock or draws a random number.
"""

from polluxd.policy.cache import Cache
from polluxd.policy.decision import decide

__all__ = ["Cache", "decide"]
