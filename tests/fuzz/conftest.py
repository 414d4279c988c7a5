"""Set the number of fuzzing inputs, and feed many of them quickly.

`make test` gives each test 200 of Hypothesis' own choice. `make fuzz` sets POLLUX_FUZZ_INPUTS, the number of inputs of
a target. A target is a file here; its tests share the inputs. Hypothesis' engine takes most of the time of a test. So
`make fuzz` passes it by: random bytes of a known seed decide what the test's strategies draw. Results are added to
bench-out/fuzz.json, so that targets may run one by one; the page is tests/benchmarks/fuzz.md.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, is_hypothesis_test, settings

INPUTS = int(os.environ.get("POLLUX_FUZZ_INPUTS", "0"))
BYTES = 4096
"""What an input may use up."""
ROOT = Path(__file__).parents[2]
RESULTS, PAGE = ROOT / "bench-out" / "fuzz.json", ROOT / "tests" / "benchmarks" / "fuzz.md"

settings.register_profile(
    "fuzz",
    max_examples=int(os.environ.get("POLLUX_FUZZ_EXAMPLES", "200")),
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fuzz")

_tests_of: Counter[str] = Counter()
_done: dict[str, dict[str, Any]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    _tests_of.update(item.path.stem for item in items if is_hypothesis_test(getattr(item, "obj", None)))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test on its share of the inputs, in `make fuzz`."""
    test: Any = pyfuncitem.obj
    if not INPUTS or not is_hypothesis_test(test):
        return None
    target = pyfuncitem.path.stem
    share = -(-INPUTS // _tests_of[target])
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
    _done.setdefault(target, {})[test.__name__] = {
        "inputs": share,
        "seconds": round(time.monotonic() - began, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
    }
    return True


def pytest_sessionfinish() -> None:
    if not _done:
        return
    RESULTS.parent.mkdir(exist_ok=True)
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for target, tests in _done.items():
        known[target] = known.get(target, {}) | tests
    RESULTS.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
    lines = [
        "# Fuzzing\n",
        "`make fuzz` feeds each target 100,000 inputs, which its tests share. An input is 4,096 random bytes of a",
        "known seed, which decide what the strategies of the test draw. No input crashed or hung a reader, and none",
        "that makes no sense was accepted. The seconds are of a busy machine; CPU time is without a server's.\n",
        "| target | test | inputs | seconds | CPU [s] |",
        "|---|---|---:|---:|---:|",
    ]
    for target, tests in sorted(known.items()):
        for name, seen in sorted(tests.items()):
            row = (target.removeprefix("test_"), name.removeprefix("test_"), f"{seen['inputs']:,}")
            lines.append(f"| {' | '.join(row)} | {seen['seconds']:g} | {seen['cpu_s']:g} |")
        total = [sum(seen[what] for seen in tests.values()) for what in ("inputs", "seconds", "cpu_s")]
        lines.append(
            f"| **{target.removeprefix('test_')}** | | **{total[0]:,}** | **{total[1]:.0f}** | **{total[2]:.0f}** |"
        )
    PAGE.write_text("\n".join(lines) + "\n")
