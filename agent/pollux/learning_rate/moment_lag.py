"""Raise Adam's factor while its second moment lags behind the batch size.

Adam steps along g / sqrt(v), and v is an average over many steps: a thousand at beta2 = 0.999. The square root of
AdaScale's gain r is right once v has settled at the present batch size. Until then v still holds the larger squares of
smaller batches, and the steps are too short. With v frozen Adam is SGD with a fixed preconditioner, whose factor is r.

In between, v's level follows from the batch sizes that it has averaged. With M in units of M0, the expected square of a
gradient is sqr + var / M, which is linear in 1 / M: v stands at the square of a batch of H, the harmonic mean of those
batches under v's own weights. The factor is therefore multiplied by sqrt(r(M) / r(H)). After a batch has shrunk it is
below 1: v is then too small for the noisier gradients.

Adafactor divides a step by its root mean square over d (1 or more) where that is above 1. A settled v makes steps of
root mean square 1. One that lags makes steps of 1 / c, where c is the factor above. The cut bounds them by d, so no
factor below 1 / d is needed. Its v is a product of row and column averages over their mean. Each of the three is linear
in the squares, so v stands at H as well where noise and signal have the same ratio in all elements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pollux.goodput import NoiseScale, gain

SETTLED = 1e-3
"""Relative distance of H from M below which v counts as settled."""


class MomentLag:
    """The batch sizes in each parameter group's second moment.

    A part of checkpoints: a restart is where the batch size changes most.
    """

    def __init__(self) -> None:
        self._averages: list[tuple[float, float]] = []
        """Of each group: the weighted sum of M0 / M, and the sum of the weights."""

    def correction(self, group: int, scale: float, noise: NoiseScale | None, clip: float = math.inf) -> float:
        """Return the factor for a step of `scale` M0 on top of the square root.

        `clip`: the root mean square of g / sqrt(v) above which the optimizer shortens its step.
        """
        scale = max(scale, 1.0)
        total, weight = self._averages[group] if group < len(self._averages) else (0.0, 0.0)
        if noise is None or not weight:
            return 1.0
        held = weight / total
        if abs(held / scale - 1.0) < SETTLED:
            return 1.0
        short = math.sqrt(float(gain(noise, 1.0, scale)) / float(gain(noise, 1.0, held)))
        return max(short, 1.0 / clip)

    def stepped(self, scale: float, newest: Sequence[float]) -> None:
        """Count an optimizer step of `scale` M0. `newest`: the weight of its squared gradient in each group's v."""
        self._averages += [(0.0, 0.0)] * (len(newest) - len(self._averages))
        inverse = 1.0 / max(scale, 1.0)
        self._averages = [
            (total + share * (inverse - total), weight + share * (1.0 - weight))
            for (total, weight), share in zip(self._averages, newest, strict=False)
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"averages": [list(pair) for pair in self._averages]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._averages = [(float(total), float(weight)) for total, weight in state["averages"]]
