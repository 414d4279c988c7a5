"""The scheduler's orders to a job, as the publisher delivers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DrainOrder:
    """Stop at a checkpoint, acknowledge it, and wait to be killed."""

    move: int


@dataclass(frozen=True)
class ResizeOrder:
    """Resize in place. `terms` as the gateway gives them, unchecked."""

    terms: Mapping[str, Any]


@dataclass(frozen=True)
class ResizeWithdrawn:
    """No order to resize stands."""


Order = DrainOrder | ResizeOrder | ResizeWithdrawn
