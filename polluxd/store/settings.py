"""Settings between people, JSON and the model: what makes sense, and what to say where it does not. Pure."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from polluxd.errors import ConfigError
from polluxd.gpu_counts import RULES, is_rule
from polluxd.model import Settings


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _by_name(value: object, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(isinstance(k, str) and good(v) for k, v in value.items())


def _weights(value: object) -> bool:
    return _by_name(value, lambda w: _number(w) and w > 0)


def _gpus(value: object) -> bool:
    return _by_name(value, lambda n: isinstance(n, int) and not isinstance(n, bool) and n >= 0)


def _switch(value: object) -> bool:
    return isinstance(value, bool)


_A_POWER = "a number up to 1 (-1 by default, 0 geometric mean, 1 mean, -inf max-min)"
_WEIGHTS = 'finite weights above 0 by name, such as {"physics": 2}'
_GPUS = 'whole numbers of GPUs by name, such as {"physics": 16}'

_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "power": (lambda v: v == -math.inf or (_number(v) and v <= 1), _A_POWER),
    "account_weights": (_weights, _WEIGHTS),
    "user_weights": (_weights, _WEIGHTS),
    "qos_weights": (_weights, _WEIGHTS),
    "job_weights": (
        lambda v: _weights(v) and all(re.fullmatch(r"[1-9][0-9]*", k) for k in v),
        'finite weights above 0 by job id, such as {"1234": 2}',
    ),
    "account_ceilings": (_gpus, _GPUS),
    "user_ceilings": (_gpus, _GPUS),
    "account_guarantees": (_gpus, _GPUS),
    "user_guarantees": (_gpus, _GPUS),
    "paused": (_switch, "true or false"),
    "partial_nodes": (_switch, "true or false"),
    "gpu_counts": (lambda v: isinstance(v, str) and is_rule(v), RULES),
    "starvation_bound": (
        lambda v: v is None or (_number(v) and v > 0),
        "seconds above 0, or none",
    ),
    "remaining_work_power": (lambda v: _number(v) and -4 <= v <= 4, "a number from -4 to 4"),
    "hysteresis": (lambda v: _number(v) and 0 <= v <= 1, "a share from 0 to 1"),
}


def setting_to_json(name: str, value: object) -> str:
    """A setting's value as JSON text, checked.

    Raises:
        ConfigError: no such setting, or not a value for it.
    """
    if name not in Settings.__slots__ or name not in _RULES:
        known = sorted(set(_RULES) & set(Settings.__slots__))
        raise ConfigError(f"no setting {name!r}: there are {', '.join(known)}")
    if name == "power" and isinstance(value, str) and value.strip() in ("-inf", "-infinity"):
        value = -math.inf
    good, expected = _RULES[name]
    if not good(value):
        raise ConfigError(f"setting {name}: expected {expected}, got {value!r}")
    # JSON has no infinity.
    return (
        '"-inf"' if value == -math.inf else json.dumps(dict(value) if isinstance(value, Mapping) else value)
    )


def settings_from_rows(stored: Mapping[str, Any], defaults: Settings) -> Settings:
    """What was stored, decoded, over the defaults; a setting of a later version is passed over."""
    values = {name: getattr(defaults, name) for name in Settings.__slots__}
    values |= {name: stored[name] for name in values if name in stored}
    if values["power"] == "-inf":
        values["power"] = -math.inf
    return Settings(**values)
