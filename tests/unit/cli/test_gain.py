"""`polluxctl decisions gain`: what decisions promise, added up."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pollux.goodput import NoiseScale
from polluxd.cli.decisions import BLOCKS, gain, speedups
from polluxd.model import JobSpec, Placement, Snapshot
from polluxd.policy import decide
from tests.build import job, nodes, report

MEASURED = report(explored=8, noise=NoiseScale(1.0, 30.0), explored_nodes=2)
WAITING = Snapshot("dev", 1e9, nodes(2), tuple(job(n, JobSpec(max_gpus=8), report=MEASURED) for n in (1, 2)))


def held(*placements: Placement) -> Snapshot:
    return replace(
        WAITING,
        jobs=tuple(replace(j, placement=p) for j, p in zip(WAITING.jobs, placements, strict=True)),
    )


def test_waiting_jobs_have_nothing_now():
    now, planned = speedups(WAITING)
    assert now == 0.0
    assert planned == math.fsum(a.speedup for a in decide(WAITING).allocations) > 0


def test_jobs_that_hold_what_is_decided_gain_nothing():
    plan = decide(WAITING)
    now, planned = speedups(held(*(a.placement for a in plan.allocations)))
    assert now == pytest.approx(planned)


def test_jobs_on_fewer_gpus_than_decided_gain():
    now, planned = speedups(held(Placement(("n1",), 1), Placement(("n2",), 1)))
    assert 0 < now < planned


def test_the_sum_weighs_each_decision_by_its_time():
    found = gain([(0.0, 1.0, 2.0), (100.0, 1.0, 4.0), (400.0, 9.0, 9.0)])
    assert found is not None
    assert (found.decisions, found.hours) == (3, pytest.approx(400 / 3600))
    assert (found.held, found.planned) == (1.0, pytest.approx((2 * 100 + 4 * 300) / 400))
    assert found.gained_hours == pytest.approx((1 * 100 + 3 * 300) / 3600)
    assert found.error is None, "two decisions show no spread"


def test_the_time_that_polluxd_did_not_run_does_not_count():
    found = gain([(0.0, 1.0, 2.0), (1e6, 1.0, 2.0)])
    assert found is not None
    assert found.hours == pytest.approx(600 / 3600)
    assert gain([(0.0, 1.0, 2.0)]) is None


def test_the_error_is_the_spread_of_blocks():
    blocks = [n % 2 for n in range(BLOCKS) for _ in range(7)]
    found = gain([(60.0 * n, 1.0, 1.0 + won) for n, won in enumerate([*blocks, 0])])
    assert found is not None
    # Ten means, five of them 0 and five 1: standard deviation sqrt(10/4/9); Student's t is 2.262.
    assert found.error == pytest.approx(2.262 * math.sqrt(2.5 / 9) / math.sqrt(10))
