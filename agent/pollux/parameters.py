"""The parameters of the goodput model, as values.

Nothing here needs numpy, whose import costs a command such as `polluxctl status` 0.1 s.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import NamedTuple


class ThroughputParams(NamedTuple):
    """theta of the throughput model (section 3.2, equations 8 to 11). Seconds; `gamma` has no unit."""

    alpha_grad: float
    beta_grad: float
    """Seconds per example of a local pass."""
    alpha_local: float
    beta_local: float
    """Seconds per GPU beyond the second, all on one node."""
    alpha_node: float
    beta_node: float
    """Seconds per GPU beyond the second, over several nodes."""
    gamma: float
    """Overlap of computing and synchronising: 1 none, large perfect."""
    alpha_rack: float | None = None
    """Third pair, for placements over racks; None (both): not measured, the pair over nodes counts."""
    beta_rack: float | None = None
    """Seconds per GPU beyond the second, over several racks."""


class NoiseScale(NamedTuple):
    """Gradient statistics of the preconditioned noise scale (section 3.1)."""

    sqr: float
    """|P g|^2: squared norm of the true gradient."""
    var: float
    """tr(P Sigma P^T): covariance trace of a gradient over M0 examples."""

    def phi(self, m0: float) -> float:
        """Return the noise scale in examples; infinite for a zero gradient."""
        if self.sqr <= 0:
            return float("inf") if self.var > 0 else 0.0
        return float(m0 * self.var / self.sqr)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Batch sizes that a job allows [examples]. Raises ValueError if they contradict each other."""

    initial: int
    """M0: the batch size that the user submitted."""
    maximum: int
    """M_max: the largest total batch size."""
    local_min: int
    """m_min: the fewest examples per GPU and pass."""
    local_max: int
    """m_max: the most examples per GPU and pass (GPU memory)."""
    halves: bool = False
    """One GPU can make a measured step in two passes of half its examples: above M0 the other steps need one pass."""

    def __post_init__(self) -> None:
        for name in ("initial", "maximum", "local_min", "local_max"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < 1:
                raise ValueError(
                    f"batch limit {name} must be a whole number of examples from 1, got {value!r}"
                )
        if self.maximum < self.initial:
            raise ValueError(
                f"the largest batch size ({self.maximum}) is below the initial one ({self.initial}): "
                "raise the maximum or leave it out"
            )
        if self.local_max < self.local_min:
            raise ValueError(
                f"per-GPU batch sizes run from {self.local_min} to {self.local_max}: "
                "the second must not be smaller"
            )


@dataclass(frozen=True)
class BatchChoice:
    """A batch of `gpus * local_batch * (accumulation + 1)` examples."""

    local_batch: int
    accumulation: int

    def size(self, gpus: int) -> int:
        return gpus * self.local_batch * (self.accumulation + 1)
