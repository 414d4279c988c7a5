"""Measured step times: the configuration of a time, the table to fit."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Configuration(NamedTuple):
    """The configuration that a step time depends on."""

    nodes: int
    gpus: int
    local_batch: int
    racks: int = 1


class ProfileRows(NamedTuple):
    """The profile as columns, one row per configuration. The arguments of `pollux.fit.fit`."""

    nodes: NDArray[np.float64]
    gpus: NDArray[np.float64]
    local_batch: NDArray[np.float64]
    racks: NDArray[np.float64]
    local: NDArray[np.float64]
    """T_grad as measured; NaN if never measured."""
    final: NDArray[np.float64]
    """Synchronising pass as measured; NaN if never measured."""
    weights: NDArray[np.float64]
