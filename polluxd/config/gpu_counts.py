"""Rules on the numbers of GPUs that a job may be given.

`JobSpec.gpu_counts` and `PolicySettings.gpu_counts` hold the rules as users write them. All functions here are pure.
"""

from __future__ import annotations

import re

# Nine digits are more than any cluster has, and as many as the submission hook lets pass.
_RULE = re.compile(r"any|powers-of-two|whole-nodes|[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*")

RULES = "any, powers-of-two, whole-nodes, or a list of counts such as 1,2,4,8"
"""For messages that say what was expected."""


def is_rule(text: str) -> bool:
    return _RULE.fullmatch(text) is not None
