"""The goodput model: throughput times statistical efficiency.

    GOODPUT(a, m, s) = THROUGHPUT(a, m, s) * EFFICIENCY(M)         M = K m (s + 1)

The source is section 3 of Pollux (OSDI 2021). `K` GPUs on `N` nodes, `m` examples per GPU and pass, `s` accumulation
passes before the synchronising pass. All functions broadcast over numpy arrays. torch is not needed, so that the daemon
and the agent share one model. Units: seconds, examples, GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pollux.parameters import BatchChoice, BatchLimits, NoiseScale, ThroughputParams

# What this module re-exports: mypy asks for it. All other names are its own.
__all__ = ["BatchChoice", "BatchLimits", "NoiseScale", "ThroughputParams"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BATCH_SIZES = 50
"""Batch sizes tried per placement, in geometric spacing (the artifact's number; the optimum is flat)."""

_TINY = 1e-12  # no pass is faster than this [s]; keeps absurd parameters from dividing by zero
_CHUNK = 4096  # pairs per vectorised slice: its temporaries (x 50 x 8 bytes) stay in the cache


class Optimum(NamedTuple):
    """The best batch size per placement; zeros if none is feasible. All fields have the placements' shape."""

    goodput: Floats
    """Examples of M0-equivalent progress per second."""
    local_batch: Ints
    """m*"""
    accumulation: Ints
    """s*"""
    batch_size: Ints
    """M* = K m* (s* + 1)"""


def _floats(x: ArrayLike) -> Floats:
    return np.asarray(x, dtype=np.float64)


def accumulation_time(params: ThroughputParams, m: ArrayLike) -> Floats:
    """T_grad(m): a local forward and backward pass over `m` examples [s]."""
    return np.maximum(params.alpha_grad + params.beta_grad * _floats(m), _TINY)


def sync_time(params: ThroughputParams, nodes: ArrayLike, gpus: ArrayLike, racks: ArrayLike = 1) -> Floats:
    """T_sync: synchronising the gradients [s]; zero on one GPU.

    `racks` is the number of racks that the placement spans.
    """
    nodes, gpus = _floats(nodes), _floats(gpus)
    beyond = np.maximum(gpus - 2.0, 0.0)
    local = params.alpha_local + params.beta_local * beyond
    across = params.alpha_node + params.beta_node * beyond
    alpha_rack, beta_rack = rack_pair(params)
    afar = alpha_rack + beta_rack * beyond
    across = np.where(_floats(racks) < 2, across, afar)
    return np.where(gpus < 2, 0.0, np.where(nodes < 2, local, across))


def rack_pair(params: ThroughputParams) -> tuple[float, float]:
    """Return (alpha, beta) over racks; if not measured, those over nodes."""
    if params.alpha_rack is None or params.beta_rack is None:
        return params.alpha_node, params.beta_node
    return params.alpha_rack, params.beta_rack


def _overlap(grad: Floats, sync: Floats, gamma: ArrayLike) -> Floats:
    """(grad^gamma + sync^gamma)^(1/gamma). The larger term is factored out, so that no power overflows."""
    high = np.maximum(grad, sync)
    low = np.minimum(grad, sync)
    gamma = _floats(gamma)
    return high * (1.0 + (low / high) ** gamma) ** (1.0 / gamma)


def step_time(
    params: ThroughputParams,
    nodes: ArrayLike,
    gpus: ArrayLike,
    m: ArrayLike,
    s: ArrayLike = 0,
    racks: ArrayLike = 1,
) -> Floats:
    """T_iter: one step of `s` accumulation passes and a synchronising one [s]."""
    grad = accumulation_time(params, m)
    return _floats(s) * grad + _overlap(grad, sync_time(params, nodes, gpus, racks), params.gamma)


def throughput(
    params: ThroughputParams,
    nodes: ArrayLike,
    gpus: ArrayLike,
    m: ArrayLike,
    s: ArrayLike = 0,
    racks: ArrayLike = 1,
) -> Floats:
    """Examples per second, M / T_iter."""
    batch = _floats(gpus) * _floats(m) * (_floats(s) + 1.0)
    return batch / step_time(params, nodes, gpus, m, s, racks)


def efficiency(noise: NoiseScale | None, m0: ArrayLike, batch_size: ArrayLike) -> Floats:
    """EFFICIENCY(M) = (phi + M0) / (phi + M), at most 1 (equation 7).

    Unknown noise (None) gives the lower bound: 1 up to M0, and M0 / M beyond, as without noise.
    """
    scale = _floats(batch_size) / _floats(m0)
    if noise is None:
        return np.minimum(1.0, 1.0 / scale)
    return np.minimum(1.0, gain(noise, m0, batch_size) / scale)


def gain(noise: NoiseScale | None, m0: ArrayLike, batch_size: ArrayLike) -> Floats:
    """Steps of size M0 that one step of size M is worth (AdaScale's r).

    r = (var + sqr) / (var / scale + sqr). Unknown noise gives 1: a larger batch is not known to be worth more.
    """
    scale = _floats(batch_size) / _floats(m0)
    if noise is None:
        return np.ones_like(scale)
    var, sqr = max(noise.var, 0.0), max(noise.sqr, 0.0)
    largest = max(var, sqr)
    # Scaled first, as in `_shares`: the sum of two huge values overflows.
    var, sqr = (var / largest, sqr / largest) if largest > 0 else (0.0, 1.0)
    return 1.0 / (var / (var + sqr) / scale + sqr / (var + sqr))


def _shares(var: Floats, sqr: Floats) -> tuple[Floats, Floats]:
    """Divide var and sqr by their sum; without a measurement: no noise."""
    var, sqr = np.maximum(var, 0.0), np.maximum(sqr, 0.0)
    largest = np.maximum(var, sqr)
    safe = np.where(largest > 0, largest, 1.0)  # scaled first: the sum of two huge values overflows
    v, q = var / safe, np.where(largest > 0, sqr / safe, 1.0)
    return v / (v + q), q / (v + q)


@dataclass(frozen=True)
class Goodput:
    """One job's goodput function.

    `adaptive=False` holds the batch size at M0, as near as the division among GPUs and passes allows. A batch that the
    division makes larger counts as M0 examples only, so that rounding is never an advantage.
    """

    params: ThroughputParams
    noise: NoiseScale | None
    limits: BatchLimits
    adaptive: bool = True

    def evaluate(
        self, nodes: ArrayLike, gpus: ArrayLike, m: ArrayLike, s: ArrayLike = 0, racks: ArrayLike = 1
    ) -> Floats:
        """Goodput [examples/s] at a local batch and accumulation. Arguments broadcast; limits are not checked."""
        batch = _floats(gpus) * _floats(m) * (_floats(s) + 1.0)
        noise = self.noise if self.adaptive else None
        time = step_time(self.params, nodes, gpus, m, s, racks)
        return batch / time * efficiency(noise, self.limits.initial, batch)

    def optimize(self, nodes: ArrayLike, gpus: ArrayLike, racks: ArrayLike = 1) -> Optimum:
        """(m*, s*) = argmax GOODPUT for each placement (equation 13).

        Zeros if no batch size is feasible. A placement needs K >= 1 and 1 <= N <= K; `racks` counts its racks.
        """
        nodes, gpus, racks = np.broadcast_arrays(np.asarray(nodes), np.asarray(gpus), np.asarray(racks))
        index = np.zeros(nodes.size, dtype=np.int64)
        best = optimize_pairs(pack([self]), index, nodes.ravel(), gpus.ravel(), racks.ravel())
        shape = nodes.shape
        return Optimum(
            best.goodput.reshape(shape),
            best.local_batch.reshape(shape),
            best.accumulation.reshape(shape),
            best.batch_size.reshape(shape),
        )

    def best(self, nodes: int, gpus: int) -> tuple[int, int, float]:
        """Return (m*, s*) and the goodput of one placement in one rack; zeros if no batch size is feasible.

        As `optimize`, in a tenth of the time: only the noise scale changes often, so the throughput is kept.
        """
        single = self.noise is None or not self.adaptive
        found = _paces(self.params, self.limits, nodes, gpus, not self.adaptive, 1 if single else BATCH_SIZES)
        if found.m.size == 0:
            return 0, 0, 0.0
        goodput = found.throughput * efficiency(None if single else self.noise, 1.0, found.scale)
        column = int(np.argmax(goodput))
        if not 0 < goodput[column] < np.inf:
            return 0, 0, 0.0
        return int(found.m[column]), int(found.s[column]), float(goodput[column])


class _Paces(NamedTuple):
    """The divisions of a batch that the limits allow on one placement."""

    m: Floats
    s: Floats
    scale: Floats
    """Batch sizes, relative to M0."""
    throughput: Floats
    """Examples per second."""


@lru_cache(maxsize=4096)
def _paces(
    params: ThroughputParams, limits: BatchLimits, nodes: int, gpus: int, rigid: bool, points: int
) -> _Paces:
    row = np.array([[limits.initial, limits.maximum, limits.local_min, limits.local_max]], dtype=np.float64)
    halves = np.array([limits.halves])
    m, s, feasible = candidates(row, np.array([rigid]), np.array([float(gpus)]), points, halves)
    m, s = m[feasible], s[feasible]
    scale = gpus * m * (s + 1.0) / limits.initial
    return _Paces(m, s, scale, throughput(params, nodes, gpus, m, s))


class Packed(NamedTuple):
    """Many goodput functions, a column each: [J] or [J, 9]; see `pack`."""

    theta: Floats
    var: Floats
    sqr: Floats
    """var and sqr as shares of their sum; no noise (0 and 1) where unknown."""
    limits: Ints
    """[J, 4]: M0, M_max, m_min, m_max."""
    fixed: NDArray[np.bool_]
    """Only M0 is tried: the noise is unknown."""
    rigid: NDArray[np.bool_]
    """Not adaptive: M0 rounded up, M_max ignored."""
    halves: NDArray[np.bool_]
    """One GPU needs no second pass; see `BatchLimits`."""


def pack(jobs: Sequence[Goodput]) -> Packed:
    """Stack the jobs' parameters for `optimize_pairs`."""
    theta = np.array([(*g.params[:7], *rack_pair(g.params)) for g in jobs], dtype=np.float64)
    theta = theta.reshape(len(jobs), 9)
    noise = np.array(
        [(0.0, 1.0) if g.noise is None or not g.adaptive else (g.noise.var, g.noise.sqr) for g in jobs],
        dtype=np.float64,
    ).reshape(len(jobs), 2)
    limits = np.array(
        [(g.limits.initial, g.limits.maximum, g.limits.local_min, g.limits.local_max) for g in jobs],
        dtype=np.int64,
    ).reshape(len(jobs), 4)
    rigid = np.array([not g.adaptive for g in jobs], dtype=np.bool_)
    fixed = np.array([g.noise is None for g in jobs], dtype=np.bool_)
    var, sqr = _shares(noise[:, 0], noise[:, 1])
    halves = np.array([g.limits.halves for g in jobs], dtype=np.bool_)
    return Packed(theta, var, sqr, limits, fixed, rigid, halves)


def optimize_pairs(
    packed: Packed, index: ArrayLike, nodes: ArrayLike, gpus: ArrayLike, racks: ArrayLike | None = None
) -> Optimum:
    """Return the optimum of each pair of a job and a placement.

    Pair i is job `index[i]` on `gpus[i]` GPUs over `nodes[i]` nodes in `racks[i]` racks. All are [P]. Without `racks`,
    each placement lies in one rack.
    """
    index = np.asarray(index, dtype=np.int64)
    nodes, gpus = _floats(nodes), _floats(gpus)
    afar = np.zeros(index.size, dtype=np.bool_) if racks is None else np.asarray(racks) > 1
    best = Optimum(np.zeros(index.size), *(np.zeros(index.size, dtype=np.int64) for _ in range(3)))
    single = packed.fixed[index] | packed.rigid[index]
    for group, points in ((np.flatnonzero(single), 1), (np.flatnonzero(~single), BATCH_SIZES)):
        for start in range(0, group.size, _CHUNK):
            rows = group[start : start + _CHUNK]
            part = _optimize_chunk(packed, index[rows], nodes[rows], gpus[rows], afar[rows], points)
            for whole, piece in zip(best, part, strict=True):
                whole[rows] = piece
    return best


def candidates(
    limits: Floats, rigid: NDArray[np.bool_], gpus: Floats, points: int, halves: NDArray[np.bool_]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Return the divisions (m, s) to try, and which the limits allow.

    All three are [P, points]. `limits` is [P, 4] as in Packed, the others are [P]. There are about `points`
    batch sizes from M0 to M_max in geometric spacing (M0 alone if `points` is 1), each in as few passes as fit.
    """
    m0, top, low, high = (limits[:, c : c + 1] for c in range(4))
    rigid, K = rigid[:, None], gpus[:, None]
    # If the smallest local batch exceeds M0, the range of batch sizes starts there.
    first = np.maximum(m0, np.where(rigid, 0.0, np.minimum(K * low, top)))
    wanted = first * (top / first) ** np.linspace(0.0, 1.0, points) if points > 1 else first
    per_gpu = wanted / K
    # Without accumulation, one GPU has a single gradient, from which no noise scale can be measured.
    least = ((K == 1) & ~rigid & ~halves[:, None]) & (wanted > m0 + 0.5)
    passes = np.maximum(np.ceil(per_gpu / high - 1e-9), least + 1.0)
    exact, each = per_gpu / passes, K * passes
    m = np.maximum(np.ceil(exact - 1e-9), low)
    # Beyond M_max: round down, but not below M0. A schedule of M0 steps would run past its end. M may then be above
    # M_max by less than one example per GPU and pass.
    least_m = np.ceil(m0 / each - 1e-9)
    m = np.where(each * m > top, np.maximum(np.floor(exact + 1e-9), least_m), m)
    m = np.where(rigid, least_m, m)
    return m, passes - 1.0, (m >= low) & (m <= high) & ((each * m <= top) | (m == least_m))


def _optimize_chunk(
    packed: Packed, index: Ints, nodes: Floats, gpus: Floats, afar: NDArray[np.bool_], points: int
) -> Optimum:
    """`optimize_pairs` over one slice; temporaries are [P, points]."""
    limits, rigid, halves = packed.limits[index], packed.rigid[index], packed.halves[index]
    # Many jobs have the same limits, and a job has the same ones on every GPU type.
    alike = np.column_stack([limits, rigid, halves, gpus])
    order = np.lexsort(alike.T)
    new = np.ones(order.size, dtype=np.bool_)
    new[1:] = np.any(alike[order[1:]] != alike[order[:-1]], axis=1)
    first, row_of = order[new], np.empty_like(order)
    row_of[order] = np.cumsum(new) - 1
    m, s, feasible = candidates(
        limits[first].astype(np.float64), rigid[first], gpus[first], points, halves[first]
    )
    m, s, feasible = m[row_of], s[row_of], feasible[row_of]
    K, m0 = gpus[:, None], limits[:, :1].astype(np.float64)
    batch = K * m * (s + 1.0)
    feasible &= (K >= 1) & (nodes[:, None] >= 1) & (nodes[:, None] <= K)

    theta = packed.theta[index]
    grad = np.maximum(theta[:, 0:1] + theta[:, 1:2] * m, _TINY)
    beyond = np.maximum(gpus - 2.0, 0.0)
    local = theta[:, 2] + theta[:, 3] * beyond
    across = theta[:, 4] + theta[:, 5] * beyond
    if afar.any():
        across = np.where(afar, theta[:, 7] + theta[:, 8] * beyond, across)
    sync = np.where(gpus < 2, 0.0, np.where(nodes < 2, local, across))[:, None]
    time = s * grad + _overlap(grad, sync, theta[:, 6:7])
    scale = batch / m0
    var, sqr = packed.var[index][:, None], packed.sqr[index][:, None]
    # EFFICIENCY * M = gain * M0, with the gain at most the scale (efficiency at most 1).
    with np.errstate(divide="ignore", invalid="ignore"):
        steps = np.minimum(1.0 / (var / scale + sqr), scale)
    goodput = np.where(feasible, m0 * steps / time, 0.0)
    column = np.argmax(goodput, axis=1)
    row = np.arange(index.size)
    value = goodput[row, column]
    good = np.isfinite(value) & (value > 0)
    picked = [np.where(good, a[row, column], 0).astype(np.int64) for a in (m, s, batch)]
    return Optimum(np.where(good, value, 0.0), *picked)
