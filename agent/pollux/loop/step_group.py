"""The micro-batches that make up one optimizer step, and their weights in its mean."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepGroup:
    """The micro-batches of one optimizer step."""

    passes: int
    """s + 1; fewer where the pass through the data ends."""
    samples: int
    """Examples that they hold together, over all ranks."""
    local_batch: int
    begun: int = 0
    """Passes begun."""
    taken: int = 0
    """Examples in them."""
    shared: float = 0.0
    """Their weights in the step's mean."""
    weighed: bool = False
    """The present pass' loss was multiplied by its weight."""

    @property
    def synchronises(self) -> bool:
        return self.begun >= self.passes

    def begin(self, samples: int, *, last: bool) -> float:
        """A pass of `samples` examples begins, the `last` of the data or not; returns its weight in the step's mean.

        A stream may end before or after the length that was told of it: the step ends with it, its weights add up to 1.
        """
        self.weighed = False
        self.begun += 1
        self.taken += samples
        if last:
            self.passes = min(self.passes, self.begun)
        as_planned = not self.synchronises or self.taken == self.samples
        weight = samples / self.samples if as_planned else 1.0 - min(self.shared, 1.0)
        self.shared += weight
        return weight
