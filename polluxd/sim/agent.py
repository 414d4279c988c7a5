"""A job's agent as the simulator plays it: it knows what it measured, and what earlier runs of its kind left behind."""

from __future__ import annotations

import math
import zlib
from functools import lru_cache

import numpy as np

from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams

Row = tuple[int, int, int, float, float]
"""Nodes, GPUs, local batch; seconds of a local pass and of a synchronising one."""


@lru_cache(maxsize=8192)
def fitted(rows: tuple[Row, ...], prior: ThroughputParams | None = None) -> ThroughputParams:
    """The agent's own fit of these rows. Jobs of one kind measure the same things first: fits are shared."""
    from pollux.fit import fit  # noqa: PLC0415 - scipy: half a second that no other command should pay

    return fit(*zip(*rows, strict=True), prior=prior, tolerance=1e-6)


@lru_cache(maxsize=65536)
def best_batch(
    params: ThroughputParams, noise: NoiseScale | None, limits: BatchLimits, nodes: int, gpus: int
) -> tuple[int, int]:
    """(m, s) of largest predicted goodput; (0, 0) where no batch size is feasible."""
    best = Goodput(params, noise, limits).optimize(nodes, gpus)
    return int(best.local_batch), int(best.accumulation)


def kinds(nodes: int, gpus: int) -> int:
    """Which terms of the model a measurement tells about, as bits: local and node synchronisation, and their slopes."""
    if gpus < 2:
        return 0
    return (1 if nodes < 2 else 4) * (3 if gpus > 2 else 1)


def foretold(params: ThroughputParams, row: Row) -> bool:
    """Whether a fit predicts a measurement to 5 %, as near as the model comes: fitting it too would change little."""
    nodes, gpus, m, local, step = row
    grad = params.alpha_grad + params.beta_grad * m
    sync = 0.0
    if gpus > 1:
        alpha, beta = params[2:4] if nodes < 2 else params[4:6]
        sync = alpha + beta * (gpus - 2)
    whole = max(grad, sync) * (1.0 + (min(grad, sync) / max(grad, sync)) ** params.gamma) ** (
        1.0 / params.gamma
    )
    return abs(math.log(grad / local)) < 0.05 and abs(math.log(whole / step)) < 0.05


OTHER_RUN = 0.05
"""Log-error between a run and the next of the same kind: other nodes, other neighbours, other data."""


class Memory:
    """What earlier runs of one application left in the database: their measurements, and how noise grew.

    No run is like another: what one leaves is off by `OTHER_RUN` for the next, however exact its own measurements.

    Runs are told apart by fingerprint in production; here the application is the fingerprint. Its fit is renewed
    where a third more was measured than it knows, or a larger allocation was.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
        self._noise: dict[int, NoiseScale] = {}
        self._fitted_rows = 0
        self._fitted_gpus = 0
        self._params: ThroughputParams | None = None
        self.explored_gpus = 0
        self.explored_nodes = 0

    def learn(self, nodes: int, gpus: int, m: int, local: float, step: float) -> None:
        self._rows.setdefault((nodes, gpus, m), []).append((local, step))
        self.explored_gpus = max(self.explored_gpus, gpus)
        self.explored_nodes = max(self.explored_nodes, nodes)

    def learn_noise(self, epoch: int, noise: NoiseScale) -> None:
        self._noise.setdefault(epoch, noise)

    def noise(self, epoch: int) -> NoiseScale | None:
        """The noise scale that an earlier run had in this epoch."""
        return self._noise.get(epoch)

    @property
    def params(self) -> ThroughputParams | None:
        rows = len(self._rows)
        if rows and (rows > 1.3 * self._fitted_rows or self.explored_gpus > self._fitted_gpus):
            means = ((key, np.mean(times, axis=0)) for key, times in sorted(self._rows.items()))
            self._params = fitted(tuple((*key, float(a), float(b)) for key, (a, b) in means))
            self._fitted_rows, self._fitted_gpus = rows, self.explored_gpus
        return self._params


class Agent:
    """Profile, fit and batch choice of one job (the paper, section 4.1). `jitter` is the log-error of measurements.

    Measurements are of the run's own: each configuration is measured once, with one error for the whole run (other
    nodes, other neighbours) and one for the configuration.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        name: str = "",
        seed: int = 0,
        jitter: float = 0.0,
        memory: Memory | None = None,
    ) -> None:
        self.limits = limits
        self.noise: NoiseScale | None = None
        self.explored_gpus = 0
        self.explored_nodes = 0
        self._rows: dict[tuple[int, int, int], Row] = {}
        self._kinds = 0
        self._batches: set[int] = set()
        self._stale = False
        self._params: ThroughputParams | None = None
        self.memory = memory
        self._jitter = jitter
        # A stream per job, by its name: what others do, and in which process, changes nothing.
        self._random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self._bias = self._error(0.5)
        self._left_behind = self._drawn(OTHER_RUN) if memory is not None else 1.0

    def _error(self, share: float = 1.0) -> float:
        return self._drawn(share * self._jitter) if self._jitter else 1.0

    def _drawn(self, sigma: float) -> float:
        return float(np.exp(self._random.normal(0.0, sigma)))

    def measure(
        self, nodes: int, gpus: int, m: int, step: float, sync: float, noise: NoiseScale, epoch: int
    ) -> None:
        """One configuration's times, and the gradient statistics of the moment."""
        key = (nodes, gpus, m)
        if self._jitter:
            noise = NoiseScale(noise.sqr * self._error(2.0), noise.var * self._error(2.0))
        self.noise = noise
        if self.memory is not None:
            error = self._drawn(OTHER_RUN), self._drawn(OTHER_RUN)
            self.memory.learn_noise(epoch, NoiseScale(noise.sqr * error[0], noise.var * error[1]))
        if key in self._rows:
            return
        own = self._bias * self._error()
        row = (nodes, gpus, m, max(step - sync, 1e-9) * own * self._error(0.3), step * own)
        self._rows[key] = row
        # What the fit foretells needs no new fit, unless it frees a term that was at its bound till now.
        new = kinds(nodes, gpus) & ~self._kinds or (m not in self._batches and len(self._batches) < 2)
        self._stale |= bool(new) or self._params is None or not foretold(self._params, row)
        self._kinds |= kinds(nodes, gpus)
        self._batches.add(m)
        self.explored_gpus = max(self.explored_gpus, gpus)
        self.explored_nodes = max(self.explored_nodes, nodes)
        if self.memory is not None:
            apart = self._left_behind * self._drawn(0.5 * OTHER_RUN)
            self.memory.learn(*key, row[3] * apart, row[4] * apart)

    @property
    def params(self) -> ThroughputParams | None:
        """The fit to what was measured; before that, what earlier runs left; None without either."""
        prior = self.memory.params if self.memory is not None else None
        if not self._rows:
            return prior
        if self._stale:
            self._params = fitted(tuple(self._rows.values()), prior)
            self._stale = False
        return self._params

    def choose(self, nodes: int, gpus: int) -> tuple[int, int]:
        """The batch size to train at on this placement: (m, s)."""
        params = self.params
        if params is None:
            return 0, 0
        return best_batch(params, self.noise, self.limits, nodes, gpus)
