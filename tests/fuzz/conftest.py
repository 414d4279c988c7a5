"""Set the number of fuzzing inputs per test: POLLUX_FUZZ_EXAMPLES.

`make test` uses 200, `make fuzz` 100,000.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("POLLUX_FUZZ_EXAMPLES", "200")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")
