"""Set the number of fuzzing inputs, and feed many of them quickly.

`make test` gives each test 200 of Hypothesis' own choice. `make fuzz` sets POLLUX_FUZZ_INPUTS, the number of inputs of
a target. A target is a file here; its tests share the inputs. Hypothesis' engine takes most of the time of a test. So
`make fuzz` passes it by: random bytes of a known seed decide what the test's strategies draw.

A test that has had its whole share of 100,000 inputs replaces its row in tests/benchmarks/fuzz.md, and no other row.
So targets and tests may run one by one, and a run with fewer inputs leaves the page as it is.
"""

from __future__ import annotations

import inspect
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, is_hypothesis_test, settings

from contrib.commit import COMMIT
from tests.fuzz.page import with_row

INPUTS = int(os.environ.get("POLLUX_FUZZ_INPUTS", "0"))
BYTES = 4096
"""What an input may use up."""
PAGE = Path(__file__).parents[1] / "benchmarks" / "fuzz.md"

settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("POLLUX_FUZZ_EXAMPLES", "200")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on its share of the inputs, in `make fuzz`."""
    test: Any = pyfuncitem.obj
    if not INPUTS or not is_hypothesis_test(test):
        return None
    tests = [name for name, found in vars(pyfuncitem.module).items() if is_hypothesis_test(found)]
    share = -(-INPUTS // len(tests))
    began, cpu = time.monotonic(), time.process_time()
    refused, number = 0, 0
    fixtures = {name: pyfuncitem.funcargs[name] for name in inspect.signature(test).parameters}

    def body(**drawn: Any) -> None:
        test.hypothesis.inner_test(**fixtures, **drawn)

    # fuzz_one_input knows no fixtures, so the test is made again with its fixtures inside.
    one = given(**test.hypothesis._given_kwargs)(body).hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    while number - refused < share:
        seed = f"{test.__name__}:{number}"
        try:
            # None: the bytes did not suffice.
            refused += one(random.Random(seed).randbytes(BYTES)) is None
        except BaseException as error:
            error.add_note(f"input {number} of {test.__name__}: random.Random({seed!r}).randbytes({BYTES})")
            raise
        number += 1
        assert refused <= number // 2 + 100, "the strategies draw more than an input has"
    seconds, cpu_s = time.monotonic() - began, time.process_time() - cpu
    row = (f"{share:,}", f"{seconds:.1f}", f"{cpu_s:.1f}", COMMIT)
    PAGE.write_text(with_row(PAGE.read_text(), INPUTS, pyfuncitem.path.stem, tests, test.__name__, row))
    return True
