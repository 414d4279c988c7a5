"""Fit the throughput model to measured step times (Pollux, section 4.1).

L-BFGS-B minimises the RMSLE (root mean squared logarithmic error) of predicted against measured times. It works on the
logarithms of all alphas and betas, which puts parameters of very different size on one scale. Gradients are analytic.
Terms that the measurements cannot tell apart stay at their optimistic bound, so that no job starves for lack of data:
polluxd tries the job there, and the job measures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import fmin_l_bfgs_b, nnls

from pollux.goodput import ThroughputParams, rack_pair

Floats = NDArray[np.float64]

SMALLEST = 1e-8
"""Lower bound of every alpha and beta (the artifact's): logarithms and ratios stay finite."""
LARGEST = 1e7
GAMMA_RANGE = (1.0, 10.0)
GAMMA_PULL = 1e-3
"""L2 pull of gamma towards 1 (section 4.1's artifact)."""
RATIO_PULL = 1e-2
"""L2 pull of beta/alpha of the synchronisation terms towards 0."""
PRIOR_PULL = 1e-3
"""L2 pull towards a prior, per unit of log; measurements, whose error has slope 1, outweigh the pull."""
UNMEASURED = 1e-7
"""A term of synchronisation below this [s] in a prior sits at its bound: no earlier run measured it."""
NODE_FACTOR = 1.1
"""Until measured, synchronising over nodes costs at least this much more than on one node."""
NARROW = 1.25
"""Batch sizes within this factor give no slope of the local pass: the errors of the measurements would decide on it,
and
so on whether the job ever gets more GPUs."""

_SMOOTH = 1e-8  # keeps the root differentiable at a perfect fit; an RMSLE of 1e-4
_GAMMA_STARTS = (1.5, 4.0)
_ROUGH = 1e-3  # relative tolerance at which the better start shows
_SIZE = 9
_GAMMA = 6
_PAIRS = ((2, 3), (4, 5), (7, 8))
"""Indices of alpha and beta of synchronisation in theta, by the placement's reach: node, nodes, racks."""
_ALPHAS, _BETAS = (np.array(column) for column in zip(*_PAIRS, strict=True))


@dataclass(frozen=True, slots=True)
class _Data:
    """The measurements; rows of one GPU, which never synchronise, come first."""

    m: Floats
    single: int
    """Number of rows of one GPU."""
    reach: NDArray[np.int64]
    """Of rows on several GPUs: 0 on one node, 1 over nodes, 2 over racks."""
    beyond: Floats
    """Of rows on several GPUs: the number of GPUs beyond the second."""
    grad_seen: NDArray[np.bool_]
    """Rows whose accumulation time was measured."""
    log_grad: Floats
    log_step: Floats
    weight_grad: Floats
    weight_step: Floats
    """Normalised to sum 1 (or all 0)."""


def fit(
    nodes: ArrayLike,
    gpus: ArrayLike,
    m: ArrayLike,
    accum_time: ArrayLike,
    optim_time: ArrayLike,
    *,
    racks: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    prior: ThroughputParams | None = None,
    start: ThroughputParams | None = None,
    tolerance: float = 1e-9,
) -> ThroughputParams:
    """Fit theta to measurements, one row per configuration.

    All arguments are [n]: nodes, GPUs, examples per GPU and pass, seconds of a local pass (NaN if not measured) and
    seconds of a synchronising pass (T_iter at s = 0). `racks` is the number of racks of each row (default 1); without a
    row over racks, the parameters over racks are not fitted. `weights` are the rows' weights, for instance how often
    each was seen. `prior` is an earlier fit: it holds for terms without measurements and yields to measurements.
    `start` is a fit of nearly the same rows: the search begins there alone. The search ends when a step lowers the
    error by less than `tolerance`, relative to the error (1e-6 takes two thirds of the time, and costs at most 0.003 of
    RMSLE). Rows with a time that is not positive and finite are left out. Raises ValueError if no row remains, or if
    the lengths differ.
    """
    data = clean_measurements((nodes, gpus, m, accum_time, optim_time), weights, racks)
    free, base, tie = _degrees_of_freedom(data, prior)
    pulled_to = None if prior is None else np.where(_news(data, prior), np.nan, log_parameters(prior))
    starts = [_start(data, prior, gamma) for gamma in _GAMMA_STARTS]
    if start is not None:
        starts = [log_parameters(start)]
    elif not data.reach.size:
        starts = starts[:1]  # gamma has no effect on one GPU
    lower, upper = np.full(_SIZE, np.log(SMALLEST)), np.full(_SIZE, np.log(LARGEST))
    lower[_GAMMA], upper[_GAMMA] = GAMMA_RANGE

    limits = list(zip(lower[free].tolist(), upper[free].tolist(), strict=True))

    def objective(x: Floats) -> tuple[float, Floats]:
        value, slope = loss_and_gradient(base + tie @ x, data, pulled_to)
        return value, tie.T @ slope

    def search(start: Floats, within: float) -> tuple[float, Floats]:
        found, value, _ = fmin_l_bfgs_b(
            objective,
            start,
            bounds=limits,
            factr=within / np.finfo(np.float64).eps,
            pgtol=max(1e-8, 10 * within),
            maxiter=300,
        )
        return (float(value) if np.isfinite(value) else np.inf), np.asarray(found)

    # A rough search from each start, then an exact one from the better end: an exact search from each costs more.
    rough = max(tolerance, _ROUGH) if len(starts) > 1 else tolerance
    value, found = min((search(one[free], rough) for one in starts), key=lambda f: f[0])
    if tolerance < rough and np.isfinite(value):
        value, found = search(found, tolerance)
    best = base + tie @ found if np.isfinite(value) else starts[0]
    return _finish(np.clip(best, lower, upper), data, prior)


def clean_measurements(
    columns: Sequence[ArrayLike], weights: ArrayLike | None, racks: ArrayLike | None = None
) -> _Data:
    given = [np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in columns]
    for more in (weights, racks):
        given.append(
            np.ones_like(given[0]) if more is None else np.atleast_1d(np.asarray(more, dtype=np.float64))
        )
    if len({a.shape for a in given}) != 1 or given[0].ndim != 1:
        raise ValueError(
            f"expected measurements as lists of one length, got shapes {[a.shape for a in given]}"
        )
    n, k, batch, accum, optim, weight, spans = given
    sound = np.isfinite(optim) & (optim > 0) & np.isfinite(weight) & (weight > 0)
    sound &= (n >= 1) & (k >= n) & (batch >= 1) & np.isfinite(batch)
    if not np.any(sound):
        raise ValueError("expected at least one positive, finite step time to fit, got none")
    rows = np.flatnonzero(sound)
    rows = rows[np.argsort(k[rows] >= 2, kind="stable")]
    n, k, batch, accum, optim, weight, spans = (a[rows] for a in (n, k, batch, accum, optim, weight, spans))
    seen = np.isfinite(accum) & (accum > 0)
    # On one GPU a step is a local pass, so its time measures the local pass.
    grad = np.where(seen, accum, np.where(k < 2, optim, 1.0))
    seen |= k < 2
    weight_grad = np.where(seen, weight, 0.0)
    single = int(np.sum(k < 2))
    return _Data(
        m=batch,
        single=single,
        reach=np.where(n < 2, 0, np.where(spans < 2, 1, 2))[single:].astype(np.int64),
        beyond=k[single:] - 2.0,
        grad_seen=seen,
        log_grad=np.log(np.where(seen, grad, 1.0)),
        log_step=np.log(optim),
        weight_grad=weight_grad / max(weight_grad.sum(), np.finfo(float).tiny),
        weight_step=weight / weight.sum(),
    )


def log_parameters(params: ThroughputParams) -> Floats:
    """Return theta [9] as the fit uses it: logarithms of times, and gamma.

    An unknown pair over racks is the pair over nodes.
    """
    logs = np.empty(_SIZE)
    logs[:_GAMMA] = np.log(np.clip(np.array(params[:_GAMMA], dtype=np.float64), SMALLEST, LARGEST))
    logs[_GAMMA] = np.clip(params.gamma, *GAMMA_RANGE)
    logs[7:] = np.log(np.clip(rack_pair(params), SMALLEST, LARGEST))
    return logs


def _news(data: _Data, prior: ThroughputParams) -> NDArray[np.bool_]:
    """Return which terms [9] these measurements are the first to tell about.

    Both terms of a pair of synchronisation, where the prior's alpha sits at the bound. Nothing pulls them there, where
    the logarithm has no slope and the search would stay.
    """
    logs, found = log_parameters(prior), np.zeros(_SIZE, dtype=np.bool_)
    for reach, pair in enumerate(_PAIRS):
        found[list(pair)] = logs[pair[0]] < math.log(UNMEASURED) and np.any(data.reach == reach)
    return found


def _degrees_of_freedom(
    data: _Data, prior: ThroughputParams | None
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the free parameters x [f], and theta = base [9] + tie [9, f] @ x."""
    known = np.zeros(_SIZE, dtype=np.bool_)
    known[:2] = True
    known[_GAMMA] = data.reach.size > 0
    for reach, (alpha, beta) in enumerate(_PAIRS):
        known[alpha] = np.any(data.reach == reach)
        known[beta] = np.any((data.reach == reach) & (data.beyond > 0))
    if prior is None:
        base = np.full(_SIZE, np.log(SMALLEST))
        base[_GAMMA] = GAMMA_RANGE[0]
    else:
        base = log_parameters(prior)
    narrow = float(data.m.max()) < NARROW * float(data.m.min())
    if narrow:
        known[0] = False
    free = np.flatnonzero(known)
    base = np.where(known, 0.0, base)
    tie = np.zeros((_SIZE, free.size))
    tie[free, np.arange(free.size)] = 1.0
    if narrow:
        # Split the measured time evenly, alpha_grad = beta_grad * m, or as the prior does.
        log_prior = None if prior is None else log_parameters(prior)
        base[0] = np.mean(np.log(data.m)) if log_prior is None else log_prior[0] - log_prior[1]
        tie[0] = tie[1]
    return free, base, tie


def _start(data: _Data, prior: ThroughputParams | None, gamma: float) -> Floats:
    """Return a starting point of the search.

    Local passes come from non-negative least squares, synchronisation from the remaining time.
    """
    if prior is not None:
        start = log_parameters(prior)
        start[_GAMMA] = np.clip(gamma, *GAMMA_RANGE) if gamma != _GAMMA_STARTS[0] else start[_GAMMA]
        news = _news(data, prior)
        if news.any():
            start[news] = _start(data, None, gamma)[news]
        return start
    times = np.exp(np.where(data.grad_seen, data.log_grad, data.log_step - np.log(2.0)))
    root = np.sqrt(np.where(data.grad_seen, data.weight_step, 1e-3 * data.weight_step)) / times
    system = np.stack([root, root * data.m], axis=1)
    (alpha, beta), _ = nnls(system, root * times)
    shortest = float(times.min())
    # A term at zero has no slope in the logarithm: start it at a small value.
    alpha, beta = max(alpha, 0.02 * shortest), max(beta, 0.02 * shortest / float(data.m.max()))
    grad, step = (alpha + beta * data.m)[data.single :], np.exp(data.log_step[data.single :])
    rest = np.maximum(step**gamma - grad**gamma, (0.05 * step) ** gamma) ** (1.0 / gamma)
    start = np.array([alpha, beta, 1.0, 1.0, 1.0, 1.0, gamma, 1.0, 1.0])
    for reach, (first, second) in enumerate(_PAIRS):
        rows = data.reach == reach
        if np.any(rows):
            k, t = data.beyond[rows], rest[rows]
            (a, b), _ = nnls(np.stack([1.0 / t, k / t], axis=1), np.ones_like(t))
            start[first] = max(a, 0.1 * float(t.min()))
            start[second] = max(b, 0.01 * float(t.min()))
    logs = np.log(np.clip(start, SMALLEST, LARGEST))
    logs[_GAMMA] = gamma
    return logs


def _predict(u: Floats, data: _Data) -> tuple[Floats, Floats, Floats, Floats, Floats, Floats]:
    """Return log T_grad [n], log T_step [n], and the terms of their slopes.

    These terms are alpha_grad's share of T_grad [n] and, for the rows of several GPUs, log T_sync, alpha's share of
    T_sync, and T_grad's share of the step's slope.
    """
    a = np.exp(u)
    grad = a[0] + a[1] * data.m
    log_grad = np.log(grad)
    alpha, beta = a[_ALPHAS][data.reach], a[_BETAS][data.reach]
    sync = alpha + beta * data.beyond
    log_sync = np.log(sync)
    local, gamma = log_grad[data.single :], u[_GAMMA]
    # T_step^gamma = T_grad^gamma (1 + e^x); beyond e^700 the sum is its larger term to the last digit.
    powers = np.exp(np.minimum(np.maximum(gamma * (log_sync - local), -700.0), 700.0))
    log_step = log_grad.copy()
    log_step[data.single :] += np.log1p(powers) / gamma
    return log_grad, log_step, a[0] / grad, log_sync, alpha / sync, 1.0 / (1.0 + powers)


def loss_and_gradient(u: Floats, data: _Data, prior: Floats | None) -> tuple[float, Floats]:
    """Return RMSLE of both kinds of step plus the pulls, and its gradient [9].

    `prior` is as `log_parameters` returns it, nan for terms that it tells nothing about.
    """
    log_grad, log_step, first, log_sync, fixed, share = _predict(u, data)
    off_grad, off_step = log_grad - data.log_grad, log_step - data.log_step
    pull_grad, pull_step = data.weight_grad * off_grad, data.weight_step * off_step
    rmsle_grad = math.sqrt(pull_grad @ off_grad + _SMOOTH)
    rmsle_step = math.sqrt(pull_step @ off_step + _SMOOTH)
    value, slope = rmsle_grad + rmsle_step, np.zeros(_SIZE)
    by_grad, by_step = pull_grad / rmsle_grad, pull_step / rmsle_step
    many = by_step[data.single :].copy()
    by_step[data.single :] *= share
    by_grad += by_step
    slope[0] = by_grad @ first
    slope[1] = by_grad.sum() - slope[0]
    if many.size:
        rest = many * (1.0 - share)
        whole = np.bincount(data.reach, rest, minlength=3)
        slope[_ALPHAS] = np.bincount(data.reach, rest * fixed, minlength=3)
        slope[_BETAS] = whole - slope[_ALPHAS]
        local = log_grad[data.single :]
        # d log T_step / d gamma, with log T_step = log T_grad + log(1 + e^x) / gamma.
        bend = (1.0 - share) * (log_sync - local) - (log_step[data.single :] - local)
        slope[_GAMMA] = (many @ bend) / u[_GAMMA]
    pairs: tuple[tuple[int, int], ...] = _PAIRS
    if prior is None:
        value += GAMMA_PULL * (u[_GAMMA] - 1.0) ** 2
        slope[_GAMMA] += 2 * GAMMA_PULL * (u[_GAMMA] - 1.0)
    else:
        off = u - prior
        news = np.isnan(off)
        off[news] = 0.0
        pairs = tuple(pair for pair in _PAIRS if news[pair[0]])
        value += PRIOR_PULL * float(off @ off)
        slope += 2 * PRIOR_PULL * off
    for alpha, beta in pairs:
        ratio = math.exp(2.0 * (u[beta] - u[alpha]))
        value += RATIO_PULL * ratio
        slope[beta] += 2 * RATIO_PULL * ratio
        slope[alpha] -= 2 * RATIO_PULL * ratio
    return float(value), slope


def _finish(u: Floats, data: _Data, prior: ThroughputParams | None) -> ThroughputParams:
    """Return theta; terms over nodes that no run measured get a least cost.

    What an earlier run measured stays: a bad measurement on one node would otherwise keep the job there.
    """
    theta = [max(float(x), SMALLEST) for x in np.exp(u)]
    theta[_GAMMA] = float(u[_GAMMA])
    known = np.any(data.reach == 1) or (prior is not None and prior.alpha_node >= UNMEASURED)
    if data.reach.size and not known:
        for local, node in ((2, 4), (3, 5)):
            theta[node] = max(theta[node] if prior is not None else 0.0, NODE_FACTOR * theta[local])
    if not np.any(data.reach == 2):
        found = ThroughputParams(*theta[:7])
        return (
            found if prior is None else found._replace(alpha_rack=prior.alpha_rack, beta_rack=prior.beta_rack)
        )
    return ThroughputParams(*theta)
