"""Compare gradients that have different weights in their mean.

With token-weighted losses, gradient k of n has the weight t_k: its tokens. With u_k = n t_k / sum(t), the mean of
u_k g_k is the step's gradient g_B. The mean of |u_k g_k|^2 then has the expectation q |g|^2 + n V, where q is the mean
of u_k^2 and V the variance of g_B, and |g_B|^2 has |g|^2 + V. Equal weights have q = 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pollux.noise.samples import Squares, added


class StepWeights(NamedTuple):
    """The weights of a step's gradients, on the device."""

    factor: Tensor
    """Multiplies `.grad` to give the step's mean gradient."""
    spread: Tensor
    """q: the mean of u_k^2 over the gradients that are compared."""


def step_weights(total: Tensor, squares: Tensor, count: int, nominal: Tensor) -> StepWeights:
    """Return a step's weights.

    `total` is the sum of the weights and `squares` the sum of their squares, over `count` gradients. Losses were
    divided by `nominal`. Without any weight the gradient is zero.
    """
    none = total <= 0
    some = torch.where(none, 1.0, total)
    return StepWeights(torch.where(none, 0.0, nominal / some), count * squares / some**2)


def as_equal(
    local: Tensor, total: Tensor, weights: StepWeights, gradients: int, *, parts: tuple[bool, bool]
) -> tuple[Squares, Squares]:
    """Return squared norms for which the formulas of equal weights hold.

    `local` and `total` have shape [groups]. `parts` tells of each whether ranks hold parts that add up. A local norm
    that is no part is averaged over the `gradients` ranks.
    """
    n, q = gradients, weights.spread
    ratio = (n - 1) / (n - q)
    copies = n if parts[1] and not parts[0] else 1
    return added(local * ratio + total * (copies * (1.0 - q * ratio))), added(total)
