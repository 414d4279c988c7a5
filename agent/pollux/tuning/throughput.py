"""Step-time equations of the user's own, such as for pipelines.

They replace Pollux's T_iter (pollux/goodput.py).

    class Pipelined:
        def fit(self, rows): ...                                     # rows: pollux.tuning.measurements.ProfileRows
        def step_time(self, nodes, gpus, local_batch, accumulation): ...

    job = pollux.attach(model, optimizer, measuring={"step_time": Pipelined()})

The agent tunes the batch size by the user's equation. The scheduler evaluates Pollux's equation for all jobs. It gets
parameters that are fitted to the user's predictions around the measured configurations (`sampled`).
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pollux.fit import fit
from pollux.goodput import (
    BATCH_SIZES,
    BatchLimits,
    Goodput,
    NoiseScale,
    Optimum,
    ThroughputParams,
    candidates,
    efficiency,
)
from pollux.tuning.measurements import ProfileRows

logger = logging.getLogger("pollux")

Floats = NDArray[np.float64]

_SAMPLED_BATCHES = 6


class ThroughputModel(Protocol):
    """An equation of step times; its methods run in the advisor's thread."""

    def fit(self, rows: ProfileRows) -> object:
        """Adapt to the measurements, one row per configuration."""

    def step_time(self, nodes: Floats, gpus: Floats, local_batch: Floats, accumulation: Floats) -> ArrayLike:
        """Return seconds [n] of optimizer steps; all arguments are [n].

        A step has `accumulation` local passes and a synchronising one.
        """


class SampledParams(ThroughputParams):
    """theta nearest to a user's equation; it holds the equation, too."""

    model: ThroughputModel


def sampled(model: ThroughputModel, rows: ProfileRows) -> SampledParams | None:
    """Fit the user's equation, and theta to its predictions; None if it fails.

    theta is fitted around the measurements: from one GPU to twice the most measured, nodes filled as measured, local
    batches from half the least measured to twice the most.
    """
    try:
        model.fit(rows)
        nodes, gpus, batch = _around(rows)
        whole = _seconds(model, nodes, gpus, batch, np.zeros_like(batch))
        longer = _seconds(model, nodes, gpus, batch, np.ones_like(batch))
    except Exception:  # the user's code: its errors must not end the tuning
        logger.exception("the script's own throughput model failed; Pollux' equation is used")
        return None
    found = SampledParams(*fit(nodes, gpus, batch, longer - whole, whole))
    found.model = model
    return found


def _around(rows: ProfileRows) -> tuple[Floats, Floats, Floats]:
    per_node = int(np.max(rows.gpus / rows.nodes))
    most = 2 * int(rows.gpus.max())
    powers = [2**k for k in range(int(math.log2(most)) + 1)]
    places = {(1, k) for k in (*powers, per_node) if k <= max(per_node, 1)}
    places |= {(n, n * per_node) for n in powers if 1 < n * per_node <= most}
    places |= {(int(n), int(k)) for n, k in zip(rows.nodes, rows.gpus, strict=True)}
    low, high = max(rows.local_batch.min() / 2, 1.0), 2 * rows.local_batch.max()
    batches = np.unique(np.round(np.geomspace(low, high, _SAMPLED_BATCHES)))
    table = np.array([(n, k, m) for n, k in sorted(places) for m in batches], dtype=np.float64)
    return table[:, 0], table[:, 1], table[:, 2]


def _seconds(model: ThroughputModel, nodes: Floats, gpus: Floats, batch: Floats, passes: Floats) -> Floats:
    found = np.asarray(model.step_time(nodes, gpus, batch, passes), dtype=np.float64)
    if found.shape != batch.shape or not np.all(np.isfinite(found) & (found > 0)):
        raise ValueError(
            f"expected {batch.size} step times, positive and finite, got shape {found.shape}, "
            f"from {found.min() if found.size else None} to {found.max() if found.size else None}"
        )
    return found


def goodput_of(params: ThroughputParams, noise: NoiseScale | None, limits: BatchLimits) -> Goodput:
    """Return the goodput function of parameters, or of the user's equation."""
    return (
        OwnGoodput(params, noise, limits)
        if isinstance(params, SampledParams)
        else Goodput(params, noise, limits)
    )


@dataclass(frozen=True)
class OwnGoodput(Goodput):
    """Goodput by a user's equation, on one placement at a time."""

    def evaluate(
        self, nodes: ArrayLike, gpus: ArrayLike, m: ArrayLike, s: ArrayLike = 0, racks: ArrayLike = 1
    ) -> Floats:
        """Goodput [examples/s]; broadcasts to one dimension."""
        assert isinstance(self.params, SampledParams)
        n, k, batch, passes = (
            np.atleast_1d(a).astype(np.float64) for a in np.broadcast_arrays(nodes, gpus, m, s)
        )
        time = _seconds(self.params.model, n, k, batch, passes)
        total = k * batch * (passes + 1.0)
        noise = self.noise if self.adaptive else None
        value = total / time * efficiency(noise, self.limits.initial, total)
        return value if np.ndim(m) or np.ndim(s) else value[0]

    def optimize(self, nodes: ArrayLike, gpus: ArrayLike, racks: ArrayLike = 1) -> Optimum:
        """(m*, s*) on one placement; zeros if no batch size is feasible."""
        limits, k = self.limits, int(np.asarray(gpus))
        bounds = [[limits.initial, limits.maximum, limits.local_min, limits.local_max]]
        all_m, all_s, good = candidates(
            np.array(bounds, float),
            np.array([False]),
            np.array([float(k)]),
            BATCH_SIZES,
            np.array([limits.halves]),
        )
        m, s = all_m[good], all_s[good]
        if not m.size:
            zero = np.int64(0)
            return Optimum(np.float64(0.0), zero, zero, zero)  # type: ignore[arg-type]
        value = self.evaluate(nodes, k, m, s)
        best = int(np.argmax(value))
        chosen = (m[best], s[best], k * m[best] * (s[best] + 1.0))
        return Optimum(value[best], *(np.int64(x) for x in chosen))  # type: ignore[arg-type]
