"""Anything, in any order, to a small cluster with polluxd.

Jobs come, go, are held and requeued by others; nodes drain and break; calls fail or are applied unseen; clocks step;
polluxd dies and stands still. The invariants hold after each event.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from .troubled_cluster import Cluster, counted

SOAK = bool(os.environ.get("POLLUX_SOAK"))
STEPS = 100_000 if SOAK else 3_000
PER_RUN = 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_whatever_happens() -> None:
    run_state_machine_as_test(
        Cluster,
        settings=settings(
            max_examples=-(-STEPS // PER_RUN) * 3 // 2,
            stateful_step_count=PER_RUN,
            derandomize=not SOAK,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{counted['steps']} steps in {counted['runs']} runs: {dict(counted)}")
    assert counted["steps"] >= STEPS
    assert counted["requeues"] > 30
    for path in ("resize (grow)", "resize (shrink)"):
        assert counted[f"completed {path}"] > 10
