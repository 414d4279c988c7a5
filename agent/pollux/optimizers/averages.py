"""How much of a gradient's squared noise is left in averages of gradients."""

from __future__ import annotations


def lion_share(beta1: float, beta2: float) -> float:
    """The share in beta1 m + (1 - beta1) g, where m averages with beta2."""
    return (1.0 - beta1) ** 2 + beta1**2 * (1.0 - beta2) / (1.0 + beta2)


def momentum_share(momentum: float, *, nesterov: bool) -> float:
    """The share in m, an average with `momentum`.

    With Nesterov's look-ahead: in momentum m + (1 - momentum) g, where m holds g already.
    """
    return lion_share(momentum**2 if nesterov else momentum, momentum)
