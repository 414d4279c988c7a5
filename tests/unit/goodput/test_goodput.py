"""The goodput model against its formulas and against brute force.

The formulas are those of Pollux, section 3. Brute force tries all batch sizes.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pollux.goodput import (
    BatchLimits,
    Goodput,
    NoiseScale,
    ThroughputParams,
    accumulation_time,
    efficiency,
    gain,
    optimize_pairs,
    pack,
    step_time,
    sync_time,
    throughput,
)

THETA = ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.08, 0.005, 1.6)
NOISE = NoiseScale(sqr=1.0, var=8.0)
LIMITS = BatchLimits(initial=128, maximum=4096, local_min=16, local_max=256)

thetas = st.builds(
    ThroughputParams,
    st.floats(1e-8, 1.0), st.floats(1e-8, 0.1), st.floats(1e-8, 1.0), st.floats(1e-8, 0.1),
    st.floats(1e-8, 1.0), st.floats(1e-8, 0.1), st.floats(1.0, 10.0),
)  # fmt: skip
noises = st.builds(NoiseScale, st.floats(0.0, 1e6), st.floats(0.0, 1e6))


@st.composite
def limits(draw):
    initial = draw(st.integers(1, 512))
    low = draw(st.integers(1, 64))
    return BatchLimits(initial, initial * draw(st.integers(1, 64)), low, low + draw(st.integers(0, 512)))


def brute_force(job, nodes, gpus):
    """Return the best goodput over all allowed batch sizes.

    The function tries every local batch and accumulation that the limits of the job allow.
    """
    lim = job.limits
    best = 0.0
    for s in range(lim.maximum // gpus + 1):
        m = np.arange(lim.local_min, lim.local_max + 1)
        batch = gpus * m * (s + 1)
        allowed = (batch >= lim.initial) & (batch <= lim.maximum)
        if gpus == 1 and s == 0:
            allowed &= batch == lim.initial
        if np.any(allowed):
            best = max(best, float(job.evaluate(nodes, gpus, m[allowed], s).max()))
    return best


def test_step_time_is_equation_by_equation():
    assert accumulation_time(THETA, 100) == pytest.approx(0.15)
    assert sync_time(THETA, 1, 1) == 0
    assert sync_time(THETA, 1, 4) == pytest.approx(0.02 + 0.003 * 2)
    assert sync_time(THETA, 2, 8) == pytest.approx(0.08 + 0.005 * 6)
    expected = 2 * 0.15 + (0.15**1.6 + 0.11**1.6) ** (1 / 1.6)
    assert step_time(THETA, 2, 8, 100, 2) == pytest.approx(expected)
    assert throughput(THETA, 2, 8, 100, 2) == pytest.approx(8 * 100 * 3 / expected)


def test_a_placement_over_racks_has_a_pair_of_its_own_where_it_was_measured():
    afar = THETA._replace(alpha_rack=0.3, beta_rack=0.02)
    assert sync_time(afar, 2, 8, 2) == pytest.approx(0.3 + 0.02 * 6)
    assert sync_time(afar, 2, 8, 1) == sync_time(afar, 2, 8) == sync_time(THETA, 2, 8)
    assert sync_time(THETA, 2, 8, 2) == sync_time(THETA, 2, 8), "not measured: as over nodes"
    assert sync_time(afar, 1, 4, 1) == sync_time(THETA, 1, 4)
    expected = 2 * 0.15 + (0.15**1.6 + 0.42**1.6) ** (1 / 1.6)
    assert step_time(afar, 2, 8, 100, 2, racks=2) == pytest.approx(expected)
    assert throughput(afar, 2, 8, 100, 2, racks=2) == pytest.approx(8 * 100 * 3 / expected)


def table_of(jobs, nodes, gpus, racks=1):
    """Return the best goodput of each job in each configuration.

    The shape is [jobs, configurations]. One call of `optimize_pairs` computes all pairs.
    """
    nodes, gpus, racks = np.broadcast_arrays(nodes, gpus, racks)
    index = np.repeat(np.arange(len(jobs)), nodes.size)
    best = optimize_pairs(pack(jobs), index, *(np.tile(a, len(jobs)) for a in (nodes, gpus, racks)))
    return best.goodput.reshape(len(jobs), nodes.size)


def test_the_table_over_racks_agrees_with_the_function():
    nodes, gpus, racks = np.array([1, 2, 2, 4]), np.array([4, 8, 8, 16]), np.array([1, 1, 2, 2])
    jobs = [Goodput(t, NOISE, LIMITS) for t in (THETA, THETA._replace(alpha_rack=0.3, beta_rack=0.02))]
    table = table_of(jobs, nodes, gpus, racks)
    for job, row in zip(jobs, table, strict=True):
        best = job.optimize(nodes, gpus, racks)
        assert row == pytest.approx(best.goodput)
        for n, k, r, m, s, value in zip(
            nodes, gpus, racks, best.local_batch, best.accumulation, row, strict=True
        ):
            assert value == pytest.approx(float(job.evaluate(n, k, m, s, racks=r)), rel=0.02)
    assert table[0, 1] == table[0, 2]
    assert table[1, 2] < table[1, 1] == table[0, 1]


def test_gamma_runs_from_no_overlap_to_perfect_overlap():
    none, perfect = THETA._replace(gamma=1.0), THETA._replace(gamma=10.0)
    assert step_time(none, 2, 8, 100) == pytest.approx(0.15 + 0.11)
    assert step_time(perfect, 2, 8, 100) == pytest.approx(0.15, rel=0.01)


def test_efficiency_is_the_noise_scale_formula_and_gain_over_scale():
    phi = NOISE.phi(128)
    assert phi == 128 * 8
    batch = np.array([128, 256, 1024, 4096])
    assert efficiency(NOISE, 128, batch) == pytest.approx((phi + 128) / (phi + batch))
    assert gain(NOISE, 128, batch) / (batch / 128) == pytest.approx(efficiency(NOISE, 128, batch))


@given(noises, st.integers(1, 512), st.integers(1, 100))
def test_efficiency_lies_in_the_unit_interval_and_falls(noise, m0, scale):
    values = efficiency(noise, m0, np.array([m0, m0 * scale, m0 * scale * 2]))
    assert values[0] == pytest.approx(1.0)
    assert np.all((values > 0) & (values <= 1))
    assert values[1] >= values[2] - 1e-12


def test_vanishing_gradient_makes_every_batch_efficient_and_unknown_noise_none():
    assert NoiseScale(0.0, 1.0).phi(128) == float("inf")
    assert efficiency(NoiseScale(0.0, 1.0), 128, 4096) == pytest.approx(1.0)
    assert efficiency(None, 128, 256) == pytest.approx(0.5)
    assert gain(None, 128, 256) == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(
    st.builds(Goodput, thetas, st.one_of(st.none(), noises), limits(), st.booleans()),
    st.integers(1, 33),
    st.integers(1, 8),
)
def test_optimum_keeps_every_limit(job, gpus, nodes):
    nodes, noise, lim, adaptive = min(nodes, gpus), job.noise, job.limits, job.adaptive
    best = job.optimize(nodes, gpus)
    if best.goodput == 0:
        assert best.local_batch == best.accumulation == best.batch_size == 0
        return
    m, s, batch = int(best.local_batch), int(best.accumulation), int(best.batch_size)
    assert batch == gpus * m * (s + 1)
    assert lim.local_min <= m <= lim.local_max
    step = gpus * (s + 1)
    if not adaptive:
        assert lim.initial <= batch < lim.initial + step
    else:
        assert batch <= lim.maximum or batch < lim.initial + step
        assert batch >= lim.initial
        assert not (gpus == 1 and batch > lim.initial and s == 0)
        if noise is None:
            # As near M0 as whole examples allow, unless the least of so many passes is beyond it.
            assert batch < max(lim.initial, step * lim.local_min) + step
    assert best.goodput == pytest.approx(float(job.evaluate(nodes, gpus, m, s)), rel=1e-9)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 1), (1, 2), (1, 3), (1, 4), (2, 8), (4, 16), (2, 2)])
def test_fifty_batch_sizes_come_within_two_percent_of_all(nodes, gpus):
    for noise in (NOISE, NoiseScale(1.0, 100.0), NoiseScale(1.0, 0.1)):
        job = Goodput(THETA, noise, LIMITS)
        best, every = float(job.optimize(nodes, gpus).goodput), brute_force(job, nodes, gpus)
        assert 0.98 * every <= best <= every * (1 + 1e-9)


def test_unreachable_batch_sizes_are_infeasible():
    small = BatchLimits(initial=8, maximum=16, local_min=4, local_max=8)
    best = Goodput(THETA, NOISE, small).optimize(1, [2, 4, 5])
    assert best.batch_size.tolist() == [16, 16, 0]
    assert best.goodput[2] == 0


def test_rigid_batch_is_never_rewarded_for_rounding_up():
    job = Goodput(THETA, NOISE, BatchLimits(10, 10, 1, 64), adaptive=False)
    best = job.optimize([1, 1, 1], [1, 2, 7])
    assert best.batch_size.tolist() == [10, 10, 14]
    ten = Goodput(THETA, NOISE, BatchLimits(11, 11, 1, 64), adaptive=False)
    assert float(ten.optimize(1, 6).goodput) == pytest.approx(11 / float(step_time(THETA, 1, 6, 2)))


def test_table_is_the_jobs_side_by_side():
    jobs = [
        Goodput(THETA, NOISE, LIMITS),
        Goodput(THETA, None, LIMITS),
        Goodput(THETA._replace(alpha_node=0.5), NoiseScale(1.0, 50.0), LIMITS),
        Goodput(THETA, NOISE, LIMITS, adaptive=False),
    ]
    nodes, gpus = np.array([1, 1, 1, 2, 4]), np.array([1, 2, 4, 8, 16])
    table = table_of(jobs, nodes, gpus)
    assert table.shape == (4, 5)
    for row, job in zip(table, jobs, strict=True):
        assert row == pytest.approx(job.optimize(nodes, gpus).goodput)
    assert table_of([], nodes, gpus).shape == (0, 5)


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 1e-8, 1.0, 1e300]), min_size=6, max_size=6),
    st.sampled_from([1.0, 10.0]),
    st.sampled_from([0.0, 1e-300, 1.0, 1e300]),
    st.sampled_from([0.0, 1e-300, 1.0, 1e300]),
)
def test_absurd_values_give_finite_goodput(theta, gamma, sqr, var):
    job = Goodput(ThroughputParams(*theta, gamma), NoiseScale(sqr, var), LIMITS)
    best = job.optimize([1, 1, 4], [1, 4, 16])
    assert np.all(np.isfinite(best.goodput))
    assert np.all(best.goodput >= 0)


@pytest.mark.parametrize(
    "values",
    [(0, 1, 1, 1), (128, 64, 1, 1), (128, 256, 8, 4), (128.5, 256, 1, 4), (True, 2, 1, 1), (1, 2, -1, 4)],
)
def test_contradictory_limits_are_refused(values):
    with pytest.raises(ValueError, match="batch"):
        BatchLimits(*values)
