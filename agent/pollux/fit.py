"""Fit the throughput model to measured step times (Pollux, section 4.1).

The method of Levenberg and Marquardt minimises the RMSLE (root mean squared logarithmic error) of predicted against
measured times. It works on the logarithms of all alphas and betas, which puts parameters of very different size on one
scale. It ends lower than a search without curvature does (L-BFGS-B), after less than half of the evaluations. Terms
that the measurements cannot tell apart stay at their optimistic bound, so that no job starves for lack of data: polluxd
tries the job there, and the job measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

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
NEGLIGIBLE = 0.01
"""Synchronisation that adds less than this share to a step has hardly a slope in its logarithm: a search that begins
there stays, whatever the measurements say."""
NODE_FACTOR = 1.1
"""Until measured, synchronising over nodes costs at least this much more than on one node."""
NARROW = 1.25
"""Batch sizes within this factor give no slope of the local pass: the errors of the measurements would decide on it,
and so on whether the job ever gets more GPUs."""

_SMOOTH = 1e-8  # keeps the root differentiable at a perfect fit; an RMSLE of 1e-4
_GAMMA_STARTS = (1.5, 4.0)
_ROUGH = 1e-3  # relative tolerance at which the better start shows
_STEPS = 100
_DAMPING, _LEAST_DAMPING = 1e-2, 1e-8  # of the search: at its start, and after many steps that gained
_HELD = 1e15  # damping of a parameter that stays at its bound
_FAR = 3.0  # the longest step, in each logarithm
_SIZE = 9
_GAMMA = 6
_PAIRS = ((2, 3), (4, 5), (7, 8))
"""Indices of alpha and beta of synchronisation in theta, by the placement's reach: node, nodes, racks."""
_ALPHAS, _BETAS = (np.array(column) for column in zip(*_PAIRS, strict=True))
_LOWER, _UPPER = (
    np.array([*[math.log(end)] * _GAMMA, gamma, *[math.log(end)] * 2])
    for end, gamma in zip((SMALLEST, LARGEST), GAMMA_RANGE, strict=True)
)
_TINY = np.finfo(np.float64).tiny


@dataclass(frozen=True, slots=True)
class _Data:
    """The measurements; rows of one GPU, which never synchronise, come first."""

    m: Floats
    single: int
    """Number of rows of one GPU."""
    reach: NDArray[np.int64]
    """Of rows on several GPUs: 0 on one node, 1 over nodes, 2 over racks."""
    alpha: NDArray[np.int64]
    beta: NDArray[np.int64]
    """Of rows on several GPUs: the indices in theta of their pair of synchronisation."""
    beyond: Floats
    """Of rows on several GPUs: the number of GPUs beyond the second."""
    grad_seen: NDArray[np.bool_]
    """Rows whose accumulation time was measured."""
    logs: Floats
    """[2, n]: logarithms of the seconds of local passes and of steps."""
    weights: Floats
    """[2, n]: of both, normalised to sum 1 (or all 0)."""


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
    error by less than `tolerance` (1e-6 takes half of the time of 1e-9, and costs less than 1e-4 of RMSLE). Rows with a
    time that is not positive and finite are left out. Raises ValueError if no row remains, or if the lengths differ.
    """
    data = clean_measurements((nodes, gpus, m, accum_time, optim_time), weights, racks)
    earlier = None if prior is None else log_parameters(prior)
    free, base, tie = _degrees_of_freedom(data, earlier)
    first_measured = _negligible(data, earlier)
    pulled_to = None if earlier is None else np.where(first_measured, np.nan, earlier)
    if start is not None:
        begun = log_parameters(start)
        starts = [_start(data, begun, _negligible(data, begun), begun[_GAMMA])]
    else:
        # On one GPU gamma has no effect.
        gammas = _GAMMA_STARTS if data.reach.size else _GAMMA_STARTS[:1]
        starts = [_start(data, earlier, first_measured, gamma) for gamma in gammas]

    def objective(x: Floats) -> tuple[float, Floats, Floats]:
        value, slope, curvature = loss(base + tie @ x, data, pulled_to)
        return value, tie.T @ slope, tie.T @ curvature @ tie

    def search(start: Floats, within: float) -> tuple[float, Floats]:
        return _descend(objective, start, _LOWER[free], _UPPER[free], within)

    # A rough search from each start, then an exact one from the better end: an exact search from each costs more.
    rough = max(tolerance, _ROUGH) if len(starts) > 1 else tolerance
    value, found = min((search(one[free], rough) for one in starts), key=lambda f: f[0])
    if tolerance < rough and np.isfinite(value):
        value, found = search(found, tolerance)
    best = base + tie @ found if np.isfinite(value) else starts[0]
    return _finish(np.minimum(np.maximum(best, _LOWER), _UPPER), data, prior)


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
    if not sound.any():
        raise ValueError("expected at least one positive, finite step time to fit, got none")
    rows = np.concatenate([np.flatnonzero(sound & (k < 2)), np.flatnonzero(sound & (k >= 2))])
    n, k, batch, accum, optim, weight, spans = (a[rows] for a in given)
    seen = np.isfinite(accum) & (accum > 0)
    # On one GPU a step is a local pass, so its time measures the local pass.
    grad = np.where(seen, accum, np.where(k < 2, optim, 1.0))
    seen |= k < 2
    weights = np.array([np.where(seen, weight, 0.0), weight])
    single = int(np.count_nonzero(k < 2))
    reach = np.where(n < 2, 0, np.where(spans < 2, 1, 2))[single:]
    return _Data(
        m=batch,
        single=single,
        reach=reach,
        alpha=_ALPHAS[reach],
        beta=_BETAS[reach],
        beyond=k[single:] - 2.0,
        grad_seen=seen,
        logs=np.log(np.array([np.where(seen, grad, 1.0), optim])),
        weights=weights / np.maximum(weights.sum(axis=1, keepdims=True), _TINY),
    )


def log_parameters(params: ThroughputParams) -> Floats:
    """Return theta [9] as the fit uses it: logarithms of times, and gamma.

    An unknown pair over racks is the pair over nodes.
    """
    times = (*params[:6], *rack_pair(params))
    logs = [math.log(min(max(seconds, SMALLEST), LARGEST)) for seconds in times]
    logs.insert(_GAMMA, min(max(params.gamma, GAMMA_RANGE[0]), GAMMA_RANGE[1]))
    return np.array(logs)


def _negligible(data: _Data, theta: Floats | None) -> NDArray[np.bool_]:
    """Return which terms [9] these measurements are the first to measure, by the side of an earlier fit.

    Both terms of a pair of synchronisation that is at its bound, or adds next to nothing to the steps that have it.
    Nothing pulls them there, and the search begins at the measurements.
    """
    found = np.zeros(_SIZE, dtype=np.bool_)
    if theta is None or not data.reach.size:
        return found
    a, gamma = np.exp(theta), float(theta[_GAMMA])
    grad = (a[0] + a[1] * data.m)[data.single :]
    added = ((a[data.alpha] + a[data.beta] * data.beyond) / grad) ** gamma / gamma
    for first, second in _PAIRS:
        rows = data.alpha == first
        if rows.any() and float(added[rows].max()) < NEGLIGIBLE:
            found[first] = found[second] = True
    return found


def _degrees_of_freedom(data: _Data, prior: Floats | None) -> tuple[NDArray[np.int64], Floats, Floats]:
    """Return the free parameters x [f], and theta = base [9] + tie [9, f] @ x."""
    known = np.zeros(_SIZE, dtype=np.bool_)
    known[:2] = True
    known[_GAMMA] = data.reach.size > 0
    known[data.alpha] = True
    known[data.beta[data.beyond > 0]] = True
    base = np.full(_SIZE, math.log(SMALLEST)) if prior is None else prior
    narrow = float(data.m.max()) < NARROW * float(data.m.min())
    if narrow:
        known[0] = False
    free = np.flatnonzero(known)
    base = np.where(known, 0.0, base)
    if prior is None and not known[_GAMMA]:
        base[_GAMMA] = GAMMA_RANGE[0]
    tie = np.zeros((_SIZE, free.size))
    tie[free, np.arange(free.size)] = 1.0
    if narrow:
        # Split the measured time evenly, alpha_grad = beta_grad * m, or as the prior does.
        base[0] = np.mean(np.log(data.m)) if prior is None else prior[0] - prior[1]
        tie[0] = tie[1]
    return free, base, tie


def _start(data: _Data, prior: Floats | None, first_measured: NDArray[np.bool_], gamma: float) -> Floats:
    """Return a starting point of the search.

    The prior counts for terms that it has measured; `first_measured` [9] marks the others. Their local passes come from
    non-negative least squares, and their synchronisation from the remaining time.
    """
    if prior is not None:
        start = prior.copy()
        if first_measured.any():
            start = np.where(first_measured, _start(data, None, first_measured, gamma), prior)
        if gamma != _GAMMA_STARTS[0]:
            start[_GAMMA] = gamma
        return start
    log_grad, log_step = data.logs
    times = np.exp(np.where(data.grad_seen, log_grad, log_step - np.log(2.0)))
    root = np.sqrt(np.where(data.grad_seen, 1.0, 1e-3) * data.weights[1]) / times
    system = np.array([root, root * data.m]).T
    alpha, beta = not_negative(system, root * times)
    shortest = float(times.min())
    # A term at zero has no slope in the logarithm: start it at a small value.
    alpha, beta = max(alpha, 0.02 * shortest), max(beta, 0.02 * shortest / float(data.m.max()))
    grad, step = (alpha + beta * data.m)[data.single :], np.exp(log_step[data.single :])
    rest = np.maximum(step**gamma - grad**gamma, (0.05 * step) ** gamma) ** (1.0 / gamma)
    start = np.array([alpha, beta, 1.0, 1.0, 1.0, 1.0, gamma, 1.0, 1.0])
    for reach, (first, second) in enumerate(_PAIRS):
        rows = data.reach == reach
        if rows.any():
            k, t = data.beyond[rows], rest[rows]
            a, b = not_negative(np.array([1.0 / t, k / t]).T, np.ones_like(t))
            start[first] = max(a, 0.1 * float(t.min()))
            start[second] = max(b, 0.01 * float(t.min()))
    logs: Floats = np.log(np.clip(start, SMALLEST, LARGEST))
    logs[_GAMMA] = gamma
    return logs


def not_negative(system: Floats, wanted: Floats) -> tuple[float, float]:
    """Return the x [2], not negative, that minimises |system x - wanted|; `system` is [n, 2].

    Two unknowns have three candidates beside zero: both, or one of them alone. scipy's `nnls` finds the same, but its
    import holds the interpreter for half a second, in the middle of a training.
    """
    (p, q), (_, r) = system.T @ system
    u, v = system.T @ wanted
    determinant = p * r - q * q
    if determinant > 1e-12 * p * r:
        x, y = (r * u - q * v) / determinant, (p * v - q * u) / determinant
        if x >= 0 and y >= 0:
            return float(x), float(y)
    x, y = max(u, 0.0) / p if p > 0 else 0.0, max(v, 0.0) / r if r > 0 else 0.0
    # One unknown alone lowers |wanted|^2 by the square of what it explains.
    return (float(x), 0.0) if x * x * p >= y * y * r else (0.0, float(y))


def loss(u: Floats, data: _Data, prior: Floats | None) -> tuple[float, Floats, Floats]:
    """Return the RMSLE plus the pulls, its gradient and its curvature.

    The RMSLE is that of both kinds of step. The gradient is [9]. The curvature is [9, 9], as Gauss and Newton have it:
    without second derivatives of the logs. `prior` is as `log_parameters` returns it, nan for terms that it tells
    nothing about.
    """
    a, gamma = np.exp(u), float(u[_GAMMA])
    grad = a[0] + a[1] * data.m
    alpha = a[data.alpha]
    sync = alpha + a[data.beta] * data.beyond
    logs = np.empty_like(data.logs)
    logs[:] = np.log(grad)
    slower = np.log(sync) - logs[0, data.single :]
    # T_step^gamma = T_grad^gamma (1 + e^x); beyond e^700 the sum is its larger term to the last digit.
    powers = np.exp(np.minimum(np.maximum(gamma * slower, -700.0), 700.0))
    longer = np.log1p(powers) / gamma
    logs[1, data.single :] += longer
    # d log T / d theta
    slopes = np.zeros((*logs.shape, _SIZE))
    slopes[:, :, 0] = a[0] / grad
    slopes[:, :, 1] = 1.0 - slopes[:, :, 0]
    many, row = slopes[1, data.single :], np.arange(data.alpha.size)
    share = 1.0 / (1.0 + powers)
    many *= share[:, None]
    rest = 1.0 - share
    fixed = rest * alpha / sync
    many[row, data.alpha] = fixed
    many[row, data.beta] = rest - fixed
    many[:, _GAMMA] = (rest * slower - longer) / gamma

    off = logs - data.logs
    rmsle = np.sqrt((data.weights * off * off).sum(axis=1) + _SMOOTH)
    weights, slopes = (data.weights / rmsle[:, None]).ravel(), slopes.reshape(-1, _SIZE)
    value, slope = float(rmsle.sum()), (weights * off.ravel()) @ slopes
    curvature = (weights * slopes.T) @ slopes
    pairs: tuple[tuple[int, int], ...] = _PAIRS
    if prior is None:
        value += GAMMA_PULL * (gamma - 1.0) ** 2
        slope[_GAMMA] += 2 * GAMMA_PULL * (gamma - 1.0)
        curvature[_GAMMA, _GAMMA] += 2 * GAMMA_PULL
    else:
        off = u - prior
        free = np.isnan(off)
        off[free] = 0.0
        pairs = tuple(pair for pair in _PAIRS if free[pair[0]])
        value += PRIOR_PULL * float(off @ off)
        slope += 2 * PRIOR_PULL * off
        curvature.flat[:: _SIZE + 1] += 2 * PRIOR_PULL * ~free
    for first, second in pairs:
        ratio = RATIO_PULL * math.exp(2.0 * float(u[second] - u[first]))
        value += ratio
        slope[first] -= 2 * ratio
        slope[second] += 2 * ratio
        for i, j, sign in ((first, first, 1), (second, second, 1), (first, second, -1), (second, first, -1)):
            curvature[i, j] += 4 * sign * ratio
    return value, slope, curvature


def _descend(
    objective: Callable[[Floats], tuple[float, Floats, Floats]],
    at: Floats,
    lower: Floats,
    upper: Floats,
    tolerance: float,
) -> tuple[float, Floats]:
    """Return the least value within the bounds, and where it is.

    The method is Levenberg's and Marquardt's: after a step that does not gain, the next one is shorter. A parameter
    stays at its bound while the slope leads outside.
    """
    at = np.minimum(np.maximum(at, lower), upper)
    value, slope, curvature = objective(at)
    damping = _DAMPING
    for _ in range(_STEPS):
        held = ((at <= lower) & (slope > 0)) | ((at >= upper) & (slope < 0))
        damped = curvature.copy()
        damped.flat[:: at.size + 1] += np.where(held, _HELD, damping) * (1.0 + curvature.diagonal())
        try:
            np.linalg.cholesky(damped)  # fails where the system is not positive definite
            step = np.linalg.solve(damped, -slope)
        except np.linalg.LinAlgError:
            damping *= 10
            continue
        there = np.minimum(np.maximum(at + np.minimum(np.maximum(step, -_FAR), _FAR), lower), upper)
        enough = tolerance * max(value, 1.0)
        if slope @ (at - there) <= enough:
            break
        found = objective(there)
        if found[0] < value:
            gained, at, (value, slope, curvature) = value - found[0], there, found
            damping = max(damping / 10, _LEAST_DAMPING)
            if gained <= enough:
                break
        else:
            damping *= 10
    return value, at


def _finish(u: Floats, data: _Data, prior: ThroughputParams | None) -> ThroughputParams:
    """Return theta; terms over nodes that no run measured get a least cost.

    What an earlier run measured stays: a bad measurement on one node would otherwise keep the job there.
    """
    theta = [max(x, SMALLEST) for x in np.exp(u).tolist()]
    theta[_GAMMA] = float(u[_GAMMA])
    known = (data.reach == 1).any() or (prior is not None and prior.alpha_node >= UNMEASURED)
    if data.reach.size and not known:
        for local, node in ((2, 4), (3, 5)):
            theta[node] = max(theta[node] if prior is not None else 0.0, NODE_FACTOR * theta[local])
    if not (data.reach == 2).any():
        found = ThroughputParams(*theta[:7])
        return (
            found if prior is None else found._replace(alpha_rack=prior.alpha_rack, beta_rack=prior.beta_rack)
        )
    return ThroughputParams(*theta)
