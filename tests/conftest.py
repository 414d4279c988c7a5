"""What holds for all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# No test fails because the machine is slow. Under CI, Hypothesis's own profile has no deadline, and no random numbers.
settings.register_profile("untimed", deadline=None)
if not os.environ.get("CI"):
    settings.load_profile("untimed")
