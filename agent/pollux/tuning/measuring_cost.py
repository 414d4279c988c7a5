"""What a measured step of this training costs, and so how rarely to measure.

By the clock, from one end of a step to the next: the norms, the passes of half a batch, the host's own work and
whatever else comes with a measured step are all in it. No formula of sizes knows the machine.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean, median

SHARE = 0.005
"""Share of the training's time that measuring may take, unless the script states another."""

LEAST_INTERVAL = 20
"""Fewest optimizer steps from one measured gradient to the next, once the noise scale is known."""

MOST_INTERVAL = 1000
"""Most of them. The noise scale changes over a training: it is measured now and then, whatever that costs."""

_MEASURED, _PLAIN = 16, 64
"""Newest steps of each kind that count."""

_ENOUGH = 4
"""Measured steps before their cost counts: the first ones also load kernels."""


class MeasuringCost:
    """Compares measured steps with plain ones."""

    def __init__(self) -> None:
        self.share = SHARE
        """Share of the time that measuring may take."""
        self._before = 0.0
        """What was learned from steps of an earlier size."""
        self._measured: deque[float] = deque(maxlen=_MEASURED)
        self._plain: deque[float] = deque(maxlen=_PLAIN)

    def add(self, seconds: float, *, measured: bool) -> None:
        """Take the seconds of one whole optimizer step in."""
        (self._measured if measured else self._plain).append(seconds)

    @property
    def extra(self) -> float:
        """What a measured step takes longer, as a share of a plain step; 0 while unknown."""
        if len(self._measured) < _ENOUGH or len(self._plain) < 2 * _ENOUGH:
            return self._before
        # Without the quarter at either end: a pause of the machine is no cost of measuring.
        times = sorted(self._measured)
        cut = len(times) // 4
        return max(fmean(times[cut : len(times) - cut]) / median(self._plain) - 1.0, 0.0)

    def cool(self) -> None:
        """Steps have another size from here on. What was learned holds until enough of them are timed."""
        self._before = self.extra
        self._measured.clear()
        self._plain.clear()

    def interval(self, steps: int) -> int:
        """Return the optimizer steps from one sample to the next, of `steps` measured steps each."""
        return int(min(max(steps * self.extra / self.share, LEAST_INTERVAL), MOST_INTERVAL))
