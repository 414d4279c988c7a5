"""Provide traces for the simulator's tests.

Parametric traces are made here; the published ones are used where they are present.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from polluxd.sim.applications import BUILT_IN
from polluxd.sim.workload import Submission

ROOT = Path(__file__).parents[2]
OSDI21 = ROOT / os.environ.get("POLLUX_OSDI21", "../shared/data/osdi21")


@pytest.fixture(scope="session")
def osdi21() -> Path:
    if not (OSDI21 / "profiles").is_dir():
        pytest.skip(f"no OSDI'21 data at {OSDI21}: set POLLUX_OSDI21 to its folder")
    return OSDI21


@pytest.fixture
def apps():
    return BUILT_IN


@pytest.fixture
def burst():
    """Twelve small jobs in eleven minutes. Four nodes cannot hold them all at once."""
    kinds = ("vision-small", "speech", "recommendation")
    return tuple(
        Submission(f"job-{i}", 60.0 * i + 7, kinds[i % 3], 1 if i % 3 == 2 else 4, batch)
        for i, batch in enumerate([512, 80, 32768] * 4)
    )
