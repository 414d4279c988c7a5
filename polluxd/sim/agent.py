"""A simulated job's agent: what it measured, and earlier runs' fits."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pollux.fit import fit
from pollux.goodput import BatchLimits, Goodput, NoiseScale, ThroughputParams, rack_pair

Row = tuple[int, int, int, float, float, int]
"""Nodes, GPUs, local batch; seconds of a local pass and of a synchronising one; racks."""


@lru_cache(maxsize=8192)
def fitted(
    rows: tuple[Row, ...], prior: ThroughputParams | None = None, start: ThroughputParams | None = None
) -> ThroughputParams:
    """Fit these rows as the agent does.

    Jobs of one kind measure the same things first: fits are shared.
    """
    *columns, racks = zip(*rows, strict=True)
    return fit(*columns, racks=racks, prior=prior, start=start, tolerance=1e-6)


def kinds(nodes: int, gpus: int, racks: int = 1) -> int:
    """Return the terms of the model that a measurement tells about, as bits.

    Synchronisation within a node, over nodes and over racks, and its slope in each.
    """
    if gpus < 2:
        return 0
    return (1 if nodes < 2 else 4 if racks < 2 else 16) * (3 if gpus > 2 else 1)


def foretold(params: ThroughputParams, row: Row) -> bool:
    """Return whether a fit predicts a measurement to 5 %.

    The model comes no nearer: fitting that measurement too would change little.
    """
    nodes, gpus, m, local, step, racks = row
    grad = params.alpha_grad + params.beta_grad * m
    sync = 0.0
    if gpus > 1:
        alpha, beta = params.alpha_node, params.beta_node
        if nodes < 2:
            alpha, beta = params.alpha_local, params.beta_local
        elif racks > 1:
            alpha, beta = rack_pair(params)
        sync = alpha + beta * (gpus - 2)
    whole = max(grad, sync) * (1.0 + (min(grad, sync) / max(grad, sync)) ** params.gamma) ** (
        1.0 / params.gamma
    )
    return abs(math.log(grad / local)) < 0.05 and abs(math.log(whole / step)) < 0.05


OTHER_RUN = 0.05
"""Log-error between a run and the next of the same kind: other nodes, other neighbours, other data."""

_TIMES = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node")


@dataclass(frozen=True, slots=True)
class Remembered:
    """The fit that a run left, and what it rests on."""

    params: ThroughputParams
    gpus: int
    """Most GPUs that were measured."""
    nodes: int
    kinds: int
    """Which terms of the model; see `kinds`."""

    def another(self, random: np.random.Generator) -> Remembered:
        """Return the fit as the next run finds it: off as a whole and by term."""
        whole = random.normal(0.0, OTHER_RUN)
        own = np.exp(whole + random.normal(0.0, OTHER_RUN, len(_TIMES)))
        values = self.params._asdict()
        changed = {name: values[name] * float(by) for name, by in zip(_TIMES, own, strict=True)}
        return replace(self, params=self.params._replace(**changed))


class Memory:
    """The fits that the runs of one application left in the database.

    Per GPU type one fit, of the run that saw most GPUs.

    As `pollux.prior` keeps them: a later fit replaces an earlier one unless that had seen more GPUs or nodes. Noise
    scales are not kept. Runs are told apart by fingerprint in production; here the application is the fingerprint.
    """

    def __init__(self) -> None:
        self._fits: dict[str, Remembered] = {}

    def leave(self, gpu_type: str, fit: Remembered) -> None:
        known = self._fits.get(gpu_type)
        if known is None or (fit.gpus >= known.gpus and fit.nodes >= known.nodes):
            self._fits[gpu_type] = fit

    def fits(self) -> Mapping[str, Remembered]:
        """By GPU type."""
        return self._fits


class _Profile:
    """One job's measurements on one GPU type, and the fit to them."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, int, int], Row] = {}
        self.prior: Remembered | None = None
        self.gpus = 0
        self.nodes = 0
        self._kinds = 0
        self._batches: set[int] = set()
        self.stale = False
        """Its measurements ask for a new fit."""
        self._settled = False
        """No term was freed since the last fit."""
        self._fitted_at = float("-inf")
        self.params: ThroughputParams | None = None
        """The fit, or what earlier runs left."""

    def fetch(self, left: Remembered) -> None:
        """Take over an earlier run's fit; this run's measurements outweigh it."""
        self.prior = left
        self._settled = False
        if self.rows:
            self.stale = True
        else:
            self.params, self._kinds = left.params, left.kinds

    def add(self, key: tuple[int, int, int, int], local: float, step: float) -> None:
        nodes, gpus, m, racks = key
        row = self.rows[key] = (nodes, gpus, m, local, step, racks)
        # What the fit foretells needs no new fit, unless it frees a term that was at its bound till now, or is
        # news to the runs that come after.
        new = bool(kinds(nodes, gpus, racks) & ~self._kinds)
        new |= self.prior is None and m not in self._batches and len(self._batches) < 2
        new |= self.prior is not None and gpus > max(self.prior.gpus, self.gpus)
        self._settled &= not new
        self.stale |= new or self.params is None or not foretold(self.params, row)
        self._kinds |= kinds(nodes, gpus, racks)
        self._batches.add(m)
        self.gpus, self.nodes = max(self.gpus, gpus), max(self.nodes, nodes)

    def due(self, now: float, apart: float) -> bool:
        """Whether the next fit may be made: the first at once."""
        return self.params is None or now - self._fitted_at >= apart

    def fit(self, now: float) -> Remembered:
        """Make the fit; return what it leaves to later runs."""
        self._fitted_at = now
        # A fit of the job's own is where the next one begins, unless a term was freed that it could not know.
        start = self.params if self._settled and self.prior is not None else None
        self.params = fitted(
            tuple(self.rows.values()), None if self.prior is None else self.prior.params, start
        )
        self.stale, self._settled = False, True
        return Remembered(self.params, self.gpus, self.nodes, self._kinds)


class Agent:
    """Profile, fit and batch choice of one job (paper, section 4.1).

    `jitter` is the log-error of measurements.

    Measurements are of the run's own: each configuration is measured once, with one error for the whole run (other
    nodes, other neighbours) and one for the configuration. GPU types are told apart; a type on which nothing was
    measured, by this run or an earlier one, is not known at all. Fits are made no more often than `seconds_apart`.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        name: str = "",
        seed: int = 0,
        jitter: float = 0.0,
        noise_jitter: float = 0.0,
        memory: Memory | None = None,
        seconds_apart: float = 0.0,
    ) -> None:
        self.limits = limits
        self.now = 0.0
        self._apart = seconds_apart
        self.noise: NoiseScale | None = None
        self.gpu_type = ""
        """The type that it last ran on."""
        self._profiles: dict[str, _Profile] = {}
        self._memory = memory
        self._jitter, self._noise_jitter = jitter, noise_jitter
        # A stream per job, by its name: what others do, and in which process, changes nothing.
        self._random = np.random.default_rng([seed, zlib.crc32(name.encode())])
        self._bias = self._error(0.5)

    def _error(self, share: float = 1.0) -> float:
        return float(np.exp(self._random.normal(0.0, share * self._jitter))) if self._jitter else 1.0

    @property
    def explored_gpus(self) -> int:
        """Most GPUs that it was measured on, of any type."""
        return max((p.gpus for p in self._profiles.values()), default=0)

    @property
    def explored_nodes(self) -> int:
        return max((p.nodes for p in self._profiles.values()), default=0)

    @property
    def prior_gpus(self) -> int:
        """Most GPUs that earlier runs were measured on, as far as it has asked."""
        return max((p.prior.gpus for p in self._profiles.values() if p.prior is not None), default=0)

    @property
    def prior_nodes(self) -> int:
        return max((p.prior.nodes for p in self._profiles.values() if p.prior is not None), default=0)

    def begin(self, gpu_type: str = "") -> None:
        """Start on GPUs of a type; fetch fits of earlier runs that saw more."""
        self.gpu_type = gpu_type
        if self._memory is None:
            return
        for kind, left in sorted(self._memory.fits().items()):
            profile = self._profiles.setdefault(kind, _Profile())
            if left.gpus > max(profile.gpus, 0 if profile.prior is None else profile.prior.gpus):
                profile.fetch(left.another(self._random))

    def measure(
        self,
        nodes: int,
        gpus: int,
        m: int,
        step: float,
        sync: float,
        noise: NoiseScale,
        gpu_type: str = "",
        racks: int = 1,
    ) -> None:
        """One configuration's times, and the gradient statistics of the moment."""
        if self._jitter:
            noise = NoiseScale(noise.sqr * self._error(2.0), noise.var * self._error(2.0))
        if self._noise_jitter:
            off = float(np.exp(self._random.normal(0.0, self._noise_jitter)))
            noise = NoiseScale(noise.sqr, noise.var * off)
        self.noise = noise
        self.gpu_type = gpu_type
        profile = self._profiles.setdefault(gpu_type, _Profile())
        key = nodes, gpus, m, racks
        if key in profile.rows:
            return
        own = self._bias * self._error()
        profile.add(key, max(step - sync, 1e-9) * own * self._error(0.3), step * own)

    def known_on(self, gpu_type: str) -> ThroughputParams | None:
        """The fit on one GPU type; None where nothing is known of it."""
        profile = self._profiles.get(gpu_type)
        if profile is None:
            return None
        if profile.stale and profile.due(self.now, self._apart):
            left = profile.fit(self.now)
            if self._memory is not None:
                self._memory.leave(gpu_type, left)
        return profile.params

    @property
    def params(self) -> ThroughputParams | None:
        """The fit on the type that it last ran on; else on any that is known."""
        here = self.known_on(self.gpu_type)
        if here is not None or len(self._profiles) == 0:
            return here
        return next(iter(self.by_type().values()), None)

    @property
    def fitted_on(self) -> str:
        """The GPU type that `params` are of; "" before any fit."""
        if self.known_on(self.gpu_type) is not None:
            return self.gpu_type
        return next(iter(self.by_type()), "")

    def by_type(self) -> dict[str, ThroughputParams]:
        """The fits by GPU type, as far as any is known."""
        found = {kind: self.known_on(kind) for kind in sorted(self._profiles)}
        return {kind: params for kind, params in found.items() if params is not None}

    def choose(self, nodes: int, gpus: int) -> tuple[int, int]:
        """The batch size to train at on this placement: (m, s)."""
        params = self.params
        if params is None:
            return 0, 0
        return Goodput(params, self.noise, self.limits).best(nodes, gpus)[:2]
