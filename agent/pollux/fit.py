"""Fitting the throughput model to a job's own measured step times (Pollux, section 4.1).

Minimises the RMSLE (root mean squared logarithmic error) of predicted against measured times with
L-BFGS-B, in the logarithm of every alpha and beta, which puts parameters of very different size on one
scale. Gradients are analytic. Terms that no measurement can tell apart sit at their optimistic bound, so
that a job never starves for want of data: it is tried there, and then measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import minimize, nnls

from pollux.goodput import ThroughputParams

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
"""L2 pull towards a prior, per unit of log: measurements, whose error has slope 1, outweigh it."""
NODE_FACTOR = 1.1
"""Synchronising over nodes is taken to cost at least this much more than on one, until measured."""

_SMOOTH = 1e-8  # keeps the root differentiable at a perfect fit; an RMSLE of 1e-4
_GAMMA_STARTS = (1.5, 4.0)


@dataclass(frozen=True, slots=True)
class _Data:
    nodes: Floats
    gpus: Floats
    m: Floats
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
    weights: ArrayLike | None = None,
    prior: ThroughputParams | None = None,
    tolerance: float = 1e-12,
) -> ThroughputParams:
    """Fit theta to measurements, one row per configuration.

    All arguments are [n]: nodes, GPUs, examples per GPU and pass, seconds of a local pass (NaN where not
    measured) and seconds of a synchronising pass (T_iter at s = 0). `weights` says how much each row counts
    (say, how often it was seen). `prior` is an earlier fit: it stands where nothing is measured, and gives
    way where something is. The search ends where a step lowers the error by less than `tolerance` of it (1e-6
    costs a third of the time, and at most 0.003 of RMSLE). Rows with a time that is not positive and finite are
    left out. Raises ValueError when none is left, or when the lengths differ.
    """
    data = _clean((nodes, gpus, m, accum_time, optim_time), weights)
    free, base, tie = _degrees_of_freedom(data, prior)
    best_value, best = np.inf, _start(data, prior, _GAMMA_STARTS[0])
    starts = [_start(data, prior, gamma) for gamma in _GAMMA_STARTS]
    if not np.any(data.gpus > 1):
        starts = starts[:1]  # gamma has no say on one GPU
    lower = np.array([np.log(SMALLEST)] * 6 + [GAMMA_RANGE[0]])
    upper = np.array([np.log(LARGEST)] * 6 + [GAMMA_RANGE[1]])

    def objective(x: Floats) -> tuple[float, Floats]:
        value, slope = _loss(base + tie @ x, data, prior)
        return value, tie.T @ slope

    for start in starts:
        result = minimize(
            objective,
            start[free],
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(lower[free], upper[free], strict=True)),
            options={"maxiter": 300, "ftol": tolerance, "gtol": max(1e-8, 10 * tolerance)},
        )
        if np.isfinite(result.fun) and result.fun < best_value:
            best_value, best = float(result.fun), base + tie @ np.asarray(result.x)
    return _finish(np.clip(best, lower, upper), data, prior)


def error(params: ThroughputParams, *columns: ArrayLike) -> float:
    """RMSLE of `params` on `fit`'s five columns; accumulation and optimizer steps added, as there."""
    data = _clean(columns, None)
    grad, step, *_ = _predict(_logs(params), data)
    return float(
        np.sqrt(np.sum(data.weight_grad * (grad - data.log_grad) ** 2))
        + np.sqrt(np.sum(data.weight_step * (step - data.log_step) ** 2))
    )


def _clean(columns: Sequence[ArrayLike], weights: ArrayLike | None) -> _Data:
    given = [np.atleast_1d(np.asarray(a, dtype=np.float64)) for a in columns]
    given.append(
        np.ones_like(given[0]) if weights is None else np.atleast_1d(np.asarray(weights, np.float64))
    )
    if len({a.shape for a in given}) != 1 or given[0].ndim != 1:
        raise ValueError(f"measurements must be lists of one length, got shapes {[a.shape for a in given]}")
    n, k, batch, accum, optim, weight = given
    sound = np.isfinite(optim) & (optim > 0) & np.isfinite(weight) & (weight > 0)
    sound &= (n >= 1) & (k >= n) & (batch >= 1) & np.isfinite(batch)
    if not np.any(sound):
        raise ValueError("no usable measurement to fit: need at least one positive, finite step time")
    n, k, batch, accum, optim, weight = (a[sound] for a in (n, k, batch, accum, optim, weight))
    seen = np.isfinite(accum) & (accum > 0)
    # On one GPU nothing is synchronised: the step itself is a measurement of the local pass.
    grad = np.where(seen, accum, np.where(k < 2, optim, 1.0))
    seen |= k < 2
    weight_grad = np.where(seen, weight, 0.0)
    return _Data(
        nodes=n,
        gpus=k,
        m=batch,
        grad_seen=seen,
        log_grad=np.log(np.where(seen, grad, 1.0)),
        log_step=np.log(optim),
        weight_grad=weight_grad / max(weight_grad.sum(), np.finfo(float).tiny),
        weight_step=weight / weight.sum(),
    )


def _logs(params: ThroughputParams) -> Floats:
    """theta as the fit sees it: logarithms of the six times, and gamma itself."""
    return np.array(
        [*np.log(np.clip(params[:6], SMALLEST, LARGEST)), np.clip(params.gamma, *GAMMA_RANGE)],
        dtype=np.float64,
    )


def _degrees_of_freedom(
    data: _Data, prior: ThroughputParams | None
) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Which of the seven the data can tell: x [f] maps to theta as base [7] + tie [7, f] @ x."""
    local = (data.gpus >= 2) & (data.nodes < 2)
    across = data.nodes >= 2
    known = np.array(
        [
            True,
            True,
            bool(np.any(local)),
            bool(np.any(local & (data.gpus > 2))),
            bool(np.any(across)),
            bool(np.any(across & (data.gpus > 2))),
            bool(np.any(data.gpus >= 2)),
        ]
    )
    base = np.array([np.log(SMALLEST)] * 6 + [GAMMA_RANGE[0]]) if prior is None else _logs(prior)
    one_batch_size = prior is None and np.unique(data.m).size == 1
    if one_batch_size:
        known[0] = False
    free = np.flatnonzero(known)
    base = np.where(known, 0.0, base)
    tie = np.zeros((7, free.size))
    tie[free, np.arange(free.size)] = 1.0
    if one_batch_size:
        # The measured time is split evenly: alpha_grad = beta_grad * m.
        base[0] = np.log(data.m[0])
        tie[0] = tie[1]
    return free, base, tie


def _start(data: _Data, prior: ThroughputParams | None, gamma: float) -> Floats:
    """A starting point: local passes by non-negative least squares, synchronisation from what remains."""
    if prior is not None:
        start = _logs(prior)
        start[6] = np.clip(gamma, *GAMMA_RANGE) if gamma != _GAMMA_STARTS[0] else start[6]
        return start
    times = np.exp(np.where(data.grad_seen, data.log_grad, data.log_step - np.log(2.0)))
    root = np.sqrt(np.where(data.grad_seen, data.weight_step, 1e-3 * data.weight_step)) / times
    system = np.stack([root, root * data.m], axis=1)
    (alpha, beta), _ = nnls(system, root * times)
    shortest = float(times.min())
    # A term at zero has no slope in the logarithm: start it small, not nowhere.
    alpha, beta = max(alpha, 0.02 * shortest), max(beta, 0.02 * shortest / float(data.m.max()))
    grad, step = alpha + beta * data.m, np.exp(data.log_step)
    rest = np.maximum(step**gamma - grad**gamma, (0.05 * step) ** gamma) ** (1.0 / gamma)
    start = np.array([alpha, beta, 1.0, 1.0, 1.0, 1.0, gamma])
    for first, rows in ((2, (data.gpus >= 2) & (data.nodes < 2)), (4, data.nodes >= 2)):
        if np.any(rows):
            k, t = data.gpus[rows] - 2.0, rest[rows]
            (a, b), _ = nnls(np.stack([1.0 / t, k / t], axis=1), np.ones_like(t))
            start[first] = max(a, 0.1 * float(t.min()))
            start[first + 1] = max(b, 0.01 * float(t.min()))
    return np.concatenate([np.log(np.clip(start[:6], SMALLEST, LARGEST)), start[6:]])


def _predict(u: Floats, data: _Data) -> tuple[Floats, Floats, Floats, Floats]:
    """log T_grad [n], log T_step [n] and their derivatives in u, [7, n] each."""
    a, gamma = np.exp(u[:6]), u[6]
    grad = a[0] + a[1] * data.m
    log_grad = np.log(grad)
    d_grad = np.zeros((7, data.m.size))
    d_grad[0], d_grad[1] = a[0] / grad, a[1] * data.m / grad
    across = data.nodes >= 2
    alpha, beta = np.where(across, a[4], a[2]), np.where(across, a[5], a[3])
    beyond = np.maximum(data.gpus - 2.0, 0.0)
    sync = alpha + beta * beyond
    log_sync = np.log(sync)
    many = data.gpus >= 2
    share = np.where(many, 1.0 / (1.0 + np.exp(np.clip(gamma * (log_sync - log_grad), -700, 700))), 1.0)
    rest = 1.0 - share
    joint = np.logaddexp(gamma * log_grad, gamma * log_sync) / gamma
    log_step = np.where(many, joint, log_grad)
    d_step = d_grad * share
    d_alpha, d_beta = rest * alpha / sync, rest * beta * beyond / sync
    d_step[2], d_step[3] = np.where(across, 0.0, d_alpha), np.where(across, 0.0, d_beta)
    d_step[4], d_step[5] = np.where(across, d_alpha, 0.0), np.where(across, d_beta, 0.0)
    d_step[6] = np.where(many, (share * log_grad + rest * log_sync - joint) / gamma, 0.0)
    return log_grad, log_step, d_grad, d_step


def _loss(u: Floats, data: _Data, prior: ThroughputParams | None) -> tuple[float, Floats]:
    """RMSLE of both kinds of step plus the pulls, and its gradient [7]."""
    log_grad, log_step, d_grad, d_step = _predict(u, data)
    value, slope = 0.0, np.zeros(7)
    for predicted, measured, weight, derivative in (
        (log_grad, data.log_grad, data.weight_grad, d_grad),
        (log_step, data.log_step, data.weight_step, d_step),
    ):
        off = predicted - measured
        rmsle = np.sqrt(np.sum(weight * off * off) + _SMOOTH)
        value += rmsle
        slope += derivative @ (weight * off) / rmsle
    if prior is None:
        value += GAMMA_PULL * (u[6] - 1.0) ** 2
        slope[6] += 2 * GAMMA_PULL * (u[6] - 1.0)
        for alpha, beta in ((2, 3), (4, 5)):
            ratio = np.exp(2.0 * (u[beta] - u[alpha]))
            value += RATIO_PULL * ratio
            slope[beta] += 2 * RATIO_PULL * ratio
            slope[alpha] -= 2 * RATIO_PULL * ratio
    else:
        off = u - _logs(prior)
        value += PRIOR_PULL * float(off @ off)
        slope += 2 * PRIOR_PULL * off
    return float(value), slope


def _finish(u: Floats, data: _Data, prior: ThroughputParams | None) -> ThroughputParams:
    """theta from logarithms, unseen node terms raised to what they cost at least."""
    theta = [*(max(float(x), SMALLEST) for x in np.exp(u[:6])), float(u[6])]
    if not np.any(data.nodes >= 2) and np.any(data.gpus >= 2):
        for local, node in ((2, 4), (3, 5)):
            theta[node] = max(theta[node] if prior is not None else 0.0, NODE_FACTOR * theta[local])
    return ThroughputParams(*theta)
