"""The factor for steps along a momentum, whatever the momentum's size.

Muon makes the momentum's singular values equal, and Lion takes its signs. The size of such a step does not depend on
the gradient, and so the square root of AdaScale's gain r seems right, as for Adam. But Adam divides by sqrt(v), and v
holds the noise of single gradients. A momentum holds a share s of that noise: 0.03 of its square at momentum 0.95.

With M in units of M0, the momentum's expected square is sqr + s var / M. The progress of a step is the learning rate
over the root of this. A step of M is to make as much progress as r steps at M0, so the factor is r / sqrt(r'), where r'
is the gain for the noise s var. At s = 1 it is the square root of r, and at s = 0 it is r, SGD's: a momentum without
noise has the same size at every batch size.
"""

from __future__ import annotations

import math

from pollux.goodput import NoiseScale, gain


def correction(scale: float, noise: NoiseScale | None, share: float) -> float:
    """Return the factor for a step of `scale` M0 on top of the square root.

    `share`: how much of the gradient's squared noise is in the momentum.
    """
    if noise is None or scale <= 1.0:
        return 1.0
    averaged = NoiseScale(noise.sqr, share * noise.var)
    return math.sqrt(float(gain(noise, 1.0, scale)) / float(gain(averaged, 1.0, scale)))
