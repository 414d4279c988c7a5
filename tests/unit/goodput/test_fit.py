"""The fit recovers planted parameters.

The fit is optimistic where nothing was measured.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from pollux import fit as fitting
from pollux.fit import NODE_FACTOR, SMALLEST, fit, not_negative
from pollux.goodput import ThroughputParams, accumulation_time, step_time

PLANTED = ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.08, 0.005, 2.0)


def measure(params, rows, noise=0.0, seed=0, without_accumulation=False):
    nodes, gpus, m = (np.array(c, dtype=float) for c in zip(*rows, strict=True))
    rng = np.random.default_rng(seed)
    accum = accumulation_time(params, m) * np.exp(noise * rng.standard_normal(m.size))
    optim = step_time(params, nodes, gpus, m, 0) * np.exp(noise * rng.standard_normal(m.size))
    if without_accumulation:
        accum = np.full(m.size, np.nan)
    return nodes, gpus, m, accum, optim


FULL = [(1, 1, 32), (1, 1, 128), (1, 2, 64), (1, 3, 128), (1, 4, 256), (2, 8, 64), (3, 12, 128), (4, 16, 200)]
FULL += [(2, 2, 64), (1, 2, 256), (1, 4, 32)]


def test_planted_parameters_are_recovered_from_clean_measurements():
    found = fit(*measure(PLANTED, FULL))
    assert np.asarray(found[:6]) == pytest.approx(np.asarray(PLANTED[:6]), rel=0.1)
    assert found.gamma == pytest.approx(PLANTED.gamma, abs=0.15)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.floats(0.005, 0.5), st.floats(1e-4, 1e-2), st.floats(0.005, 0.3), st.floats(0.01, 0.3)),
    st.floats(1.0, 5.0),
    st.floats(1.0, 4.0),
    st.integers(0, 1000),
)
def test_predictions_follow_noisy_measurements_and_carry_over(theta, node, gamma, seed):
    a, b, al, ratio = theta
    planted = ThroughputParams(a, b, al, al * ratio, al * node, al * node * ratio, gamma)
    found = fit(*measure(planted, FULL, noise=0.02, seed=seed))
    elsewhere = [(1, 2, 100), (1, 3, 48), (2, 6, 100), (4, 12, 64)]
    nodes, gpus, m, _, truth = measure(planted, elsewhere)
    assert step_time(found, nodes, gpus, m, 0) == pytest.approx(truth, rel=0.25)


def error(params, nodes, gpus, m, accum, optim):
    """Return the error that the fit minimises, without the fit's priors.

    The error is the RMSLE of accumulation passes plus the RMSLE of optimizer steps.
    """
    pairs = (accumulation_time(params, m), accum), (step_time(params, nodes, gpus, m, 0), optim)
    return sum(np.sqrt(np.mean(np.log(found / seen) ** 2)) for found, seen in pairs)


def test_fit_beats_its_own_noise_floor():
    rows = measure(PLANTED, FULL, noise=0.05, seed=3)
    assert error(fit(*rows), *rows) <= error(PLANTED, *rows) + 0.01


def test_a_fit_from_an_earlier_one_of_nearly_the_same_rows_is_as_good():
    rows = measure(PLANTED, FULL, noise=0.05, seed=4)
    earlier = fit(*(column[:-2] for column in rows))
    again = fit(*rows, start=earlier, tolerance=1e-6)
    assert error(again, *rows) <= error(fit(*rows), *rows) + 0.005


def test_steps_alone_suffice_where_accumulation_was_never_measured():
    rows = measure(PLANTED, FULL, without_accumulation=True)
    found = fit(*rows)
    assert step_time(found, *rows[:3], 0) == pytest.approx(rows[4], rel=0.03)


def test_batch_sizes_nearly_alike_tell_nothing_of_the_slope():
    rows = [(1, 1, 200), (1, 2, 198), (1, 4, 195), (4, 16, 192)]
    # The small differences are other nodes' and other neighbours': taken for a slope, there would be none.
    nodes, gpus, m, accum, optim = measure(PLANTED, rows)
    flat = accum * np.array([1.0, 1.0, 1.04, 1.05])
    found = fit(nodes, gpus, m, flat, optim + flat - accum)
    assert 0.8 < found.alpha_grad / (found.beta_grad * 196) < 1.25
    prior = PLANTED._replace(alpha_grad=0.02, beta_grad=0.001)
    kept = fit(nodes, gpus, m, flat, optim + flat - accum, prior=prior)
    assert kept.alpha_grad / kept.beta_grad == pytest.approx(20.0)


@pytest.mark.parametrize("wider", [[(1, 4, 64)], [(1, 2, 64), (1, 4, 64)], [(2, 8, 64), (4, 16, 64)]])
def test_synchronisation_is_learned_where_the_earlier_run_had_one_gpu(wider):
    one = [(1, 1, 32), (1, 1, 128)]
    slow = PLANTED._replace(alpha_local=0.2, alpha_node=0.4)
    earlier = fit(*measure(slow, one))
    rows = measure(slow, [*one, *wider])
    found = fit(*rows, prior=earlier)
    assert step_time(found, *rows[:3], 0) == pytest.approx(rows[4], rel=0.05)


def test_gradient_is_that_of_the_loss():
    racks = [1] * 5 + [1, 2, 2, 1, 1, 1]
    data = fitting.clean_measurements(measure(PLANTED, FULL, noise=0.1, seed=1), None, racks)
    rng = np.random.default_rng(0)
    known = fitting.log_parameters(PLANTED._replace(alpha_grad=0.1))
    for prior in (None, known, np.where(np.arange(9) // 2 == 1, np.nan, known)):
        for _ in range(5):
            u = fitting.log_parameters(PLANTED) + 0.3 * rng.random(9)
            _, slope, _ = fitting.loss(u, data, prior)
            for i in range(9):
                step = np.zeros(9)
                step[i] = 1e-6
                up, down = (fitting.loss(u + d, data, prior)[0] for d in (step, -step))
                assert slope[i] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-7)


def test_one_gpu_only_leaves_synchronisation_free():
    found = fit(*measure(PLANTED, [(1, 1, 32), (1, 1, 128)]))
    assert found[2:6] == pytest.approx([SMALLEST] * 4)
    assert found.alpha_grad == pytest.approx(PLANTED.alpha_grad, rel=0.01)


def test_one_node_only_puts_nodes_just_above_local():
    found = fit(*measure(PLANTED, [(1, 1, 32), (1, 1, 128), (1, 2, 64), (1, 4, 64)]))
    assert found.alpha_node == pytest.approx(NODE_FACTOR * found.alpha_local)
    assert found.beta_node == pytest.approx(NODE_FACTOR * found.beta_local)


def test_a_bad_measurement_on_one_node_does_not_hide_what_an_earlier_run_measured_over_nodes():
    """Four GPUs seem to synchronise for a second longer than two."""
    nodes, gpus, m, local, step = (
        list(column) for column in measure(PLANTED, [(1, 1, 32), (1, 2, 64), (1, 4, 64)])
    )
    step[-1] += 1.0
    found = fit(nodes, gpus, m, local, step, prior=PLANTED)
    assert found.beta_local > 5 * PLANTED.beta_local
    assert found.beta_node == pytest.approx(PLANTED.beta_node, rel=0.01)


def test_two_gpus_at_most_leave_the_slope_free():
    found = fit(*measure(PLANTED, [(1, 1, 32), (1, 1, 128), (1, 2, 64), (1, 2, 128)]))
    assert found.beta_local == pytest.approx(SMALLEST)
    assert found.beta_node == pytest.approx(NODE_FACTOR * SMALLEST)
    assert found.alpha_local > 1e-3


def test_one_batch_size_splits_the_time_evenly():
    found = fit([1], [1], [64], [np.nan], [0.2])
    assert found.alpha_grad == pytest.approx(found.beta_grad * 64, rel=1e-6)
    assert found.alpha_grad == pytest.approx(0.1, rel=0.01)


def test_the_pair_over_racks_is_fitted_where_it_was_measured_and_unknown_elsewhere():
    planted = PLANTED._replace(alpha_rack=0.3, beta_rack=0.02)
    places = [*FULL, (2, 8, 64), (4, 16, 64), (4, 8, 200), (2, 2, 128)]
    racks = np.array([1] * len(FULL) + [2, 2, 4, 2])
    nodes, gpus, m = (np.array(column, dtype=float) for column in zip(*places, strict=True))
    accum, optim = accumulation_time(planted, m), step_time(planted, nodes, gpus, m, racks=racks)
    found = fit(nodes, gpus, m, accum, optim, racks=racks)
    assert step_time(found, nodes, gpus, m, racks=racks) == pytest.approx(optim, rel=0.02)
    assert step_time(found, 3, 12, 64, racks=3) == pytest.approx(
        float(step_time(planted, 3, 12, 64, racks=3)), rel=0.05
    )
    one = racks == 1
    near = fit(nodes[one], gpus[one], m[one], accum[one], optim[one])
    assert (near.alpha_rack, near.beta_rack) == (None, None)
    known = fit(nodes[one], gpus[one], m[one], accum[one], optim[one], prior=planted)
    assert (known.alpha_rack, known.beta_rack) == (0.3, 0.02)


def test_prior_stands_where_nothing_is_measured_and_yields_where_something_is():
    slower = PLANTED._replace(alpha_grad=0.5, beta_grad=0.01)
    found = fit(*measure(PLANTED, [(1, 1, 32), (1, 1, 128)]), prior=slower)
    assert found[4:6] == pytest.approx(PLANTED[4:6])
    assert found.alpha_grad == pytest.approx(PLANTED.alpha_grad, rel=0.05)
    assert found.beta_grad == pytest.approx(PLANTED.beta_grad, rel=0.05)


@pytest.mark.parametrize("earlier", ["prior", "start"])
def test_synchronisation_that_an_earlier_run_hardly_saw_yields_to_measurements(earlier):
    """Its logarithm has no slope there: the search used to stay, and to promise twice the speed of 56 GPUs."""
    hardly = ThroughputParams(0.05, 0.001, 1.2e-5, 4.5e-7, 1.6e-5, 4.7e-7, 1.1)
    rows = [(1, 1, 32), (1, 2, 64), (1, 4, 64), (2, 8, 64), (3, 12, 64), (14, 56, 64)]
    found = fit(*measure(PLANTED, rows, noise=0.05), **{earlier: hardly})
    for nodes, gpus, m in rows:
        wanted = step_time(PLANTED, nodes, gpus, m, 0)
        assert step_time(found, nodes, gpus, m, 0) == pytest.approx(wanted, rel=0.2)


def test_prior_resolves_what_one_batch_size_leaves_open():
    prior = ThroughputParams(0.18, 0.02 / 64, 0.02, 0.003, 0.08, 0.005, 2.0)
    found = fit([1], [1], [64], [np.nan], [0.2], prior=prior)
    assert found.alpha_grad == pytest.approx(0.18, rel=0.02)


def test_weights_decide_between_contradictions():
    found = fit([1, 1], [1, 1], [64, 64], [np.nan] * 2, [0.1, 0.4], weights=[1e6, 1.0])
    assert found.alpha_grad + 64 * found.beta_grad == pytest.approx(0.1, rel=0.02)


def test_unusable_rows_are_left_out_and_none_left_is_an_error():
    found = fit([1, 1, 1], [1, 1, 1], [64, 64, 64], [np.nan] * 3, [0.2, np.nan, -1.0])
    assert found.alpha_grad + 64 * found.beta_grad == pytest.approx(0.2, rel=0.01)
    with pytest.raises(ValueError, match="positive, finite step time"):
        fit([1], [1], [64], [np.nan], [np.inf])
    with pytest.raises(ValueError, match="one length"):
        fit([1, 1], [1], [64], [np.nan], [0.1])


def test_absurd_times_still_give_finite_parameters():
    found = fit([1, 1, 4], [1, 4, 16], [1, 10**6, 64], [1e-9, np.nan, 1e5], [1e-9, 1e6, 1e-6])
    assert np.all(np.isfinite(found[:7]))
    assert min(found[:6]) >= SMALLEST


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5), st.integers(0, 10_000), st.sampled_from(["free", "alike", "zero"]))
def test_two_unknowns_that_are_not_negative_are_those_of_scipy(rows, seed, kind):
    rng = np.random.default_rng(seed)
    system = np.abs(rng.standard_normal((rows, 2))) * 10.0 ** rng.uniform(-4, 4, 2)
    if kind != "free":
        system[:, 1] = system[:, 0] * 3 if kind == "alike" else 0.0
    wanted = rng.standard_normal(rows) + 1.0
    left = np.linalg.norm(system @ np.array(not_negative(system, wanted)) - wanted)
    least = np.linalg.norm(system @ nnls(system, wanted)[0] - wanted)
    assert min(not_negative(system, wanted)) >= 0
    assert left <= least * (1 + 1e-6) + 1e-9
