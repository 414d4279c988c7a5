"""The truth about applications: step times and gradient statistics.

They are measured or parametric.

The simulator's jobs train by these; their agents and the policies see only what they measure of them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Protocol

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams, accumulation_time, step_time


class Application(Protocol):
    """The truth about one kind of training.

    `placement` is the GPUs on each node in use, in order.
    """

    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> BatchLimits: ...
    @property
    def epochs(self) -> int:
        """Statistical epochs after which a job ends."""

    @property
    def most_gpus(self) -> int | None:
        """GPUs beyond which it is never run; None: as its batch limits allow."""

    @property
    def fixed_batch(self) -> int | None:
        """The one batch size that it runs at; None: policies may choose."""

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        """A synchronising pass, and the part of it spent waiting for others [s]."""

    def noise(self, batch_size: int, epoch: int) -> NoiseScale:
        """Gradient statistics during an epoch (from 0) at a total batch size."""

    def progress(self, epoch: int) -> float:
        """Cumulative M0-iterations at the end of the first `epoch` epochs."""

    def iterations(self, batch_size: int, epoch: int) -> float:
        """Optimizer steps at one batch size, to the end of this epoch index."""

    def on(self, gpu_type: str) -> Application | None:
        """The same training on another type of GPU; None: nothing is known."""


def most_gpus(app: Application) -> int:
    """The most GPUs that the application can use at all."""
    fed = app.limits.maximum // app.limits.local_min
    return max(1, fed if app.most_gpus is None else min(fed, app.most_gpus))


@dataclass(frozen=True)
class ParametricApplication:
    """An application given by its throughput parameters.

    The growth of its noise scale over training is given too.

    `noise_scale` runs geometrically from its first to its last value [examples] over the epochs, which is the shape
    that the paper measures (section 2.2, figure 2); `examples` is the size of one statistical epoch.
    """

    name: str
    theta: ThroughputParams
    limits: BatchLimits
    epochs: int
    examples: int
    noise_scale: tuple[float, float]
    most_gpus: int | None = None
    fixed_batch: int | None = None
    speeds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Speed of local passes by GPU type, against `theta`."""

    def on(self, gpu_type: str) -> Application | None:
        speed = self.speeds.get(gpu_type.lower())
        if speed is None:
            return None
        changed = {name: getattr(self.theta, name) / speed for name in ("alpha_grad", "beta_grad")}
        return replace(self, theta=self.theta._replace(**changed))

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        gpus = sum(placement)
        step = float(step_time(self.theta, len(placement), gpus, local_batch))
        return step, step - float(accumulation_time(self.theta, local_batch))

    def noise(self, batch_size: int, epoch: int) -> NoiseScale:
        first, last = self.noise_scale
        done = min(epoch / max(self.epochs - 1, 1), 1.0)
        return NoiseScale(1.0, first * (last / first) ** done / self.limits.initial)

    def progress(self, epoch: int) -> float:
        return epoch * self.examples / self.limits.initial

    def iterations(self, batch_size: int, epoch: int) -> float:
        scale = batch_size / self.limits.initial
        steps = 0.0
        for number in range(epoch + 1):
            noise = self.noise(batch_size, number)
            gain = (noise.var + noise.sqr) / (noise.var / scale + noise.sqr)
            steps += self.progress(1) / gain
        return steps


SHIPPED_TYPES = ("t4", "v100", "a100")
"""GPU types that the shipped applications know, the first being the one that their parameters are of."""


def _application(
    name: str,
    theta: tuple[float, ...],
    limits: tuple[int, int, int, int],
    epochs: int,
    examples: int,
    noise_scale: tuple[float, float],
    speeds: tuple[float, float, float],
) -> ParametricApplication:
    return ParametricApplication(
        name,
        ThroughputParams(*theta),
        BatchLimits(*limits),
        epochs,
        examples,
        noise_scale,
        speeds=dict(zip(SHIPPED_TYPES, speeds, strict=True)),
    )


@dataclass(frozen=True)
class _Altered:
    """An application that is like another in all but what its subclass says."""

    app: Application

    @property
    def name(self) -> str:
        return self.app.name

    @property
    def limits(self) -> BatchLimits:
        return self.app.limits

    @property
    def epochs(self) -> int:
        return self.app.epochs

    @property
    def most_gpus(self) -> int | None:
        return self.app.most_gpus

    @property
    def fixed_batch(self) -> int | None:
        return self.app.fixed_batch

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        return self.app.times(placement, local_batch)

    def noise(self, batch_size: int, epoch: int) -> NoiseScale:
        return self.app.noise(batch_size, epoch)

    def progress(self, epoch: int) -> float:
        return self.app.progress(epoch)

    def iterations(self, batch_size: int, epoch: int) -> float:
        return self.app.iterations(batch_size, epoch)

    def on(self, gpu_type: str) -> Application | None:
        there = self.app.on(gpu_type)
        return None if there is None else replace(self, app=there)


@dataclass(frozen=True)
class ScaledApplication(_Altered):
    """An application trained for longer or shorter.

    The noise scale grows over it as over the whole.
    """

    work: float

    def progress(self, epoch: int) -> float:
        return self.work * self.app.progress(epoch)

    def iterations(self, batch_size: int, epoch: int) -> float:
        return self.work * self.app.iterations(batch_size, epoch)


@dataclass(frozen=True)
class FasterApplication(_Altered):
    """An application whose local passes take another time.

    The wait for other ranks is the network's, and stays.
    """

    speed: float

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        step, sync = self.app.times(placement, local_batch)
        return (step - sync) / self.speed + sync, sync


@dataclass(frozen=True)
class CalibratedApplication(_Altered):
    """An application whose whole steps take another time than its profile says."""

    factor: float

    def times(self, placement: tuple[int, ...], local_batch: int) -> tuple[float, float]:
        step, sync = self.app.times(placement, local_batch)
        return step * self.factor, sync * self.factor


def on_type(app: Application, gpu_type: str, speed: float = 1.0) -> Application:
    """Return the application on a type of GPU, at a speed.

    By its profile there, where it has one.
    """
    there = app.on(gpu_type) or app
    return there if speed == 1.0 else FasterApplication(there, speed)


BUILT_IN: Mapping[str, ParametricApplication] = {
    app.name: app
    for app in (
        # Orders of magnitude of common trainings on one mid-range GPU per worker and 10 to 25 Gb/s between nodes:
        # the small ones end in minutes on one GPU, the large ones take GPU-days. The last triple: local passes on
        # the shipped GPU types, against the first of them: most for
        # dense arithmetic, least for small kernels and embeddings.
        _application(
            "vision-small", (0.02, 7e-4, 0.01, 1e-3, 0.09, 4e-3, 2.0),
            (128, 4096, 16, 1024), 60, 50_000, (80, 9e3), (1.0, 2.0, 3.5),
        ),
        _application(
            "vision-large", (0.07, 4.3e-3, 0.01, 2e-3, 0.28, 6e-3, 2.5),
            (200, 12800, 20, 200), 40, 1_281_167, (2e3, 6e4), (1.0, 2.8, 6.0),
        ),
        _application(
            "detection", (0.08, 4e-2, 0.06, 2e-2, 0.50, 2e-2, 1.6),
            (8, 512, 4, 16), 40, 16_551, (30, 2e3), (1.0, 2.2, 4.0),
        ),
        _application(
            "speech", (0.20, 2.6e-2, 0.06, 1.5e-2, 0.30, 1e-2, 1.8),
            (20, 640, 10, 80), 60, 7_176, (20, 1e3), (1.0, 1.8, 2.6),
        ),
        _application(
            "language-tuning", (0.22, 5.9e-2, 0.05, 1.5e-2, 0.90, 5e-2, 1.3),
            (12, 384, 4, 12), 2, 88_644, (15, 400), (1.0, 3.0, 7.0),
        ),
        _application(
            "recommendation", (7e-3, 5e-7, 3e-3, 5e-4, 0.02, 1e-3, 1.2),
            (256, 32768, 32, 32768), 10, 4_970_000, (5e3, 5e4), (1.0, 1.3, 1.6),
        ),
    )
}  # fmt: skip
"""Shipped with the project, so that `simulate` is useful without any measured profile."""


TYPICAL_SPEEDS: Mapping[str, float] = {
    kind: math.exp(fmean(math.log(app.speeds[kind]) for app in BUILT_IN.values())) for kind in SHIPPED_TYPES
}
"""What an administrator would configure as the speeds of the shipped types: one number each for all trainings."""


def placement_of(gpus: int, gpus_per_node: int) -> tuple[int, ...]:
    """So many GPUs packed on as few nodes as hold them: full nodes first."""
    full, rest = divmod(gpus, gpus_per_node)
    return (gpus_per_node,) * full + ((rest,) if rest else ())


def split_batch(batch_size: int, gpus: int, limits: BatchLimits) -> tuple[int, int]:
    """Return (m, s) of a batch size that is prescribed.

    As many passes as GPU memory asks for.

    One GPU beyond M0 accumulates at least once, so that the noise scale stays measurable.
    """
    local = math.ceil(batch_size / gpus - 1e-8)
    s = math.ceil(local / limits.local_max - 1e-8) - 1
    if gpus == 1 and batch_size > limits.initial:
        s = max(s, 1)
    m = math.ceil(local / (s + 1) - 1e-8)
    return max(1, min(m, limits.maximum // (gpus * (s + 1)))), s
