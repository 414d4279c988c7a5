"""Plans and bounds at powers of -2 and below, against every plan.

Max-min is one of the powers.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

from polluxd.policy import assignment, decide, objective, steep
from polluxd.policy.domains import NOWHERE
from tests.build import job, nodes, report, snapshot
from tests.unit.policy.every_plan import at_power, compared, outside_the_gap
from tests.unit.policy.scenarios import options_of, seating_of

MANY = 4_000 if os.environ.get("POLLUX_BENCH") else 130
LOW_POWERS = (-2.0, -5.0, -10.0, -np.inf)


@pytest.mark.slow
@pytest.mark.parametrize("power", LOW_POWERS)
def test_plan_lies_within_its_gap_of_the_best_there_is_and_the_bound_is_tight(power):
    found = compared(at_power(power), range(MANY))
    assert len(found) >= 60
    assert not outside_the_gap(found)
    short = [c.seed for c in found if c.shortfall > 1e-3]
    loose = [c.seed for c in found if c.looseness > 2e-3]
    assert len(short) <= 0.02 * len(found), short
    assert len(loose) <= 0.02 * len(found), loose


@pytest.mark.parametrize("power", LOW_POWERS)
def test_of_two_jobs_of_which_one_must_wait_the_heavier_runs(power):
    jobs = [job(1, report=report(), account="lab"), job(2, report=report(), account="big")]
    plan = decide(snapshot(nodes(1, gpus=1), jobs, power=power, account_weights={"big": 5.0}))
    assert not plan.of(1).placement
    assert plan.of(2).placement.gpus == 1
    assert plan.gap <= 1e-3


def test_no_choice_of_counts_lifts_the_worst_off_job_above_the_bound():
    rng = np.random.default_rng(7)
    for _ in range(300):
        jobs, most = int(rng.integers(1, 5)), 4
        gpus = np.tile(np.arange(most), jobs)
        reached = np.sort(rng.random((jobs, most)), axis=1).ravel()
        start, capacity = np.arange(jobs + 1) * most, int(rng.integers(0, 8))
        best = max(
            reached[start[:-1] + np.array(counts)].min()
            for counts in np.ndindex(*[most] * jobs)
            if sum(counts) <= capacity
        )
        assert objective.highest_worst(reached, gpus, start, capacity) == best


def test_losses_keep_their_order_however_many_jobs_wait_and_whatever_they_weigh():
    x = np.tile([0.0, 1e-4, 0.2, 0.4, 0.8], 2_000)
    weight = np.repeat(np.geomspace(1e-2, 1e2, 2_000), 5)
    total = float(weight.sum() / 5)
    for power in LOW_POWERS:
        found = objective.utilities(x, weight, power, level=0.3, total=total, jobs=2_000).reshape(-1, 5)
        assert np.all(np.diff(found, axis=1) > 0), power
        # One more job that waits costs more than all others together could lose.
        assert found[:, 0].max() < found[:, 1].sum(), power


@pytest.mark.parametrize("reached", [0, 1, 3, 4, 6, 7, 11])
def test_the_highest_level_that_all_jobs_can_reach_is_found(reached, monkeypatch):
    """A stand-in for the program tells which of 12 levels can be reached."""
    rating, one = np.linspace(0.1, 1.2, 12), np.ones(12, dtype=np.int64)
    table = SimpleNamespace(
        jobs=(None,),
        owner=0 * one,
        weight=np.array([2.0]),
        rating=rating,
        factor=np.ones(12),
        gpus=np.arange(1, 13),
        nodes=one,
        per_node=np.arange(1, 13),
        kind=-one,
        racks=0 * one,
        kept=np.zeros(12, dtype=np.bool_),
    )
    seating = SimpleNamespace(
        table=table,
        option=[0],
        packing=SimpleNamespace(nodes=(None,), moved=lambda: np.array([False])),
        valued=lambda stay, move: SimpleNamespace(),
        may_move_to=lambda job, option: True,
        state=lambda: None,
        restore=lambda state: None,
    )

    def limit(counted):
        (useful,) = np.flatnonzero(counted.slack >= 0)
        return 0.0 if useful <= reached else -1.0

    monkeypatch.setattr(assignment, "limit", limit)
    monkeypatch.setattr(assignment, "improve", lambda seating: 0.0)
    assert steep.lift(seating, bound=10.0) == (rating[reached] + objective.FLOOR) / 2.0


@pytest.mark.parametrize("gpus", range(2, 10))
def test_the_worst_off_of_two_jobs_is_lifted_to_half_of_the_node(gpus):
    seating, _ = seating_of(nodes(1, gpus), [job(n, report=report()) for n in (1, 2)], power=-np.inf)
    half = (seating.table.rating[options_of(seating, gpus // 2, gpus // 2)] + objective.FLOOR).min()
    for bound in (half, 100.0):
        seating.clear()
        assert seating.packing.seats == [NOWHERE] * 2
        steep.lift(seating, bound)
        assert min(seating.gpus[o] for o in seating.option) == gpus // 2
