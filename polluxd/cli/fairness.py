"""Fairness as administrators tune it: the power of the p-mean, and weights of accounts and users."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from polluxd.errors import ConfigError
from polluxd.model import Settings

LARGEST_WEIGHT = 1000.0
"""A weight beyond it would leave the others nothing but rounding."""


def parse_power(text: str) -> float:
    """The p of the p-mean: at most 1, or `-inf` (`max-min`). ConfigError says what is allowed."""
    words = {"-inf": -math.inf, "max-min": -math.inf, "maxmin": -math.inf}
    try:
        power = words[text.lower()] if text.lower() in words else float(text)
    except ValueError:
        power = math.nan
    if math.isnan(power) or power > 1:
        raise ConfigError(
            f"power must be a number up to 1, or -inf (max-min): got {text!r}. "
            "1 maximises the mean speedup, 0 the geometric mean, -1 (default) the harmonic mean"
        )
    return power


def parse_weights(words: Sequence[str], present: Mapping[str, float], what: str) -> dict[str, float]:
    """`NAME=WEIGHT` words merged into `present`. Weight 1 is the default and is dropped from the table."""
    weights = dict(present)
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            weight = float(text) if equals and name else math.nan
        except ValueError:
            weight = math.nan
        if not 0 < weight <= LARGEST_WEIGHT:
            raise ConfigError(
                f"{what} weights are NAME=WEIGHT, the weight above 0 and up to {LARGEST_WEIGHT:g}: "
                f"got {word!r}. A job of weight 2 counts twice; NAME=1 removes the entry"
            )
        weights[name] = weight
    return {name: weight for name, weight in weights.items() if weight != 1.0}


def power_text(power: float) -> str:
    return "-inf (max-min)" if power == -math.inf else f"{power:g}"


def power_value(power: float) -> float | str:
    """As the database and JSON carry it: they know no infinity."""
    return "-inf" if power == -math.inf else power


def document(settings: Settings) -> dict[str, Any]:
    return {
        "power": power_value(settings.power),
        "account_weights": dict(sorted(settings.account_weights.items())),
        "user_weights": dict(sorted(settings.user_weights.items())),
        "paused": settings.paused,
        "partial_nodes": settings.partial_nodes,
    }


def lines(settings: Settings) -> list[str]:
    """The same for people."""
    meaning = {
        1.0: "mean",
        0.0: "geometric mean",
        -1.0: "harmonic mean",
        -math.inf: "the worst-off job counts",
    }
    said = meaning.get(settings.power, "between the harmonic mean and max-min" if settings.power < -1 else "")
    weights = {"account": settings.account_weights, "user": settings.user_weights}
    found = [f"power            {power_text(settings.power)}" + (f"  ({said})" if said else "")]
    for kind, table in weights.items():
        text = ", ".join(f"{name}={weight:g}" for name, weight in sorted(table.items())) or "all 1"
        found.append(f"{kind + ' weights':<16} {text}")
    parts = "equal parts of nodes allowed" if settings.partial_nodes else "whole nodes"
    return [*found, f"multi-node jobs  {parts}", f"paused           {'yes' if settings.paused else 'no'}"]
