"""The noise scale: unbiased estimates from one step, and their averages.

From `n` independent gradients of `b` examples each (Pollux, OSDI 2021, section 3.1; McCandlish et al., 2018, A.1),

    sqr = (n |g_B|^2 - |g_b|^2) / (n - 1)                           |g|^2 of the true gradient
    var = (|g_b|^2 - |g_B|^2) n/(n - 1) (b / M0)                    covariance trace of a gradient over M0 examples

where `|g_b|^2` is the mean of their squared norms and `|g_B|^2` the squared norm of their mean. This module holds the
arithmetic and the averages; `estimators.py` supplies the gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pollux.goodput import NoiseScale

Floats = NDArray[np.float64]

DECAY = 0.999
"""Weight kept by the averages over one step of M0 examples (the paper's artifact; 0.999^scale for larger steps)."""

MIN_SAMPLES = 8
"""Samples before an average counts: single estimates scatter by more than their own size."""


class SampleKind(NamedTuple):
    """The origin of the gradients of one sample."""

    gradients: int
    """n: independent gradients compared."""
    examples: float
    """b: examples in each gradient."""
    scale: float
    """M / M0 of the optimizer step."""
    steps: int = 1
    """Optimizer steps that this sample stands for (the sampling interval)."""


def unbiased(kind: SampleKind, local: Floats, total: Floats, initial: float) -> tuple[Floats, Floats]:
    """Return (sqr, var), each [groups]. `local` is the mean |g_b|^2 and `total` is |g_B|^2, each [groups]."""
    n, b = kind.gradients, kind.examples
    if n < 2:
        raise ValueError(f"a noise scale needs two gradients or more to compare, got {n}")
    sqr = (n * total - local) / (n - 1)
    var = (local - total) * (n / (n - 1)) * (b / initial)
    return sqr, var


class NoiseAverages:
    """Exponential averages of sqr and var, one pair per parameter group.

    The averages are corrected for bias. sqr and var are averaged apart and divided last: steps with the smallest |g|^2
    would dominate a mean of ratios.
    """

    def __init__(self, groups: int, *, decay: float = DECAY) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"the decay of the noise averages must lie between 0 and 1, got {decay}")
        self.decay = decay
        self.sqr: Floats = np.zeros(groups)
        self.var: Floats = np.zeros(groups)
        self.weight = 0.0
        """Sum of the weights so far; the bias correction divides by it."""
        self.samples = 0
        self.skipped = 0
        """Samples dropped because a gradient was not finite, mostly steps that AMP's loss scaling skips."""

    @property
    def ready(self) -> bool:
        return self.samples >= MIN_SAMPLES

    def add(self, kind: SampleKind, local: Floats, total: Floats, initial: float) -> None:
        """Take a sample [groups] in, or several of one kind [samples, groups].

        Several come oldest first. A sample with a value that is not finite counts as skipped and changes nothing.
        """
        local, total = np.atleast_2d(local), np.atleast_2d(total)
        good = np.isfinite(local).all(axis=1) & np.isfinite(total).all(axis=1)
        self.skipped += int((~good).sum())
        sqr, var = unbiased(kind, local[good], total[good], initial)
        keep = self.decay ** (kind.scale * kind.steps)
        weights = (1.0 - keep) * keep ** np.arange(len(sqr) - 1, -1, -1)
        left = keep ** len(sqr)
        self.sqr = left * self.sqr + weights @ sqr
        self.var = left * self.var + weights @ var
        self.weight = left * self.weight + float(weights.sum())
        self.samples += len(sqr)

    def groups(self) -> list[NoiseScale] | None:
        """Return the noise scale per parameter group; None: too few samples."""
        if not self.ready or self.weight <= 0:
            return None
        # An unbiased estimate of a square may be negative by chance; as a scale it counts as zero.
        return [
            NoiseScale(sqr=max(float(q), 0.0) / self.weight, var=max(float(v), 0.0) / self.weight)
            for q, v in zip(self.sqr, self.var, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {
            "sqr": self.sqr.tolist(),
            "var": self.var.tolist(),
            "weight": self.weight,
            "samples": self.samples,
            "skipped": self.skipped,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore them. With another number of parameter groups they start empty, since their meaning is lost."""
        sqr, var = np.asarray(state["sqr"], dtype=np.float64), np.asarray(state["var"], dtype=np.float64)
        if sqr.shape != self.sqr.shape or not (np.isfinite(sqr).all() and np.isfinite(var).all()):
            return
        self.sqr, self.var = sqr, var
        self.weight, self.samples = float(state["weight"]), int(state["samples"])
        self.skipped = int(state["skipped"])
