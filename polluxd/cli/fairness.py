"""Fairness as administrators tune it: words of the command line into settings, and settings into words. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polluxd.errors import ConfigError
from polluxd.model import Settings
from polluxd.store.settings import setting_to_json

LARGEST_WEIGHT = 1000.0
"""A weight beyond it would leave the others nothing but rounding."""


@dataclass(frozen=True, slots=True)
class FairnessOptions:
    """What was said on the command line; None: not said."""

    power: str | None = None
    accounts: Sequence[str] | None = None
    users: Sequence[str] | None = None
    qos: Sequence[str] | None = None
    jobs: Sequence[str] | None = None
    account_ceilings: Sequence[str] | None = None
    user_ceilings: Sequence[str] | None = None
    account_guarantees: Sequence[str] | None = None
    user_guarantees: Sequence[str] | None = None
    gpu_counts: str | None = None
    starvation_bound: str | None = None
    remaining_work_power: float | None = None
    hysteresis: float | None = None
    partial_nodes: bool | None = None

    def over(self, present: Settings) -> dict[str, Any]:
        """The settings that were said, by name, as `Store.set_setting` takes them; checked.

        Raises:
            ConfigError: nothing was said, or one of the values makes no sense; says what is allowed.
        """
        wanted: dict[str, Any] = {}
        if self.power is not None:
            wanted["power"] = power_value(parse_power(self.power))
        for kind, words in (
            ("account", self.accounts),
            ("user", self.users),
            ("qos", self.qos),
            ("job", self.jobs),
        ):
            if words:
                name = f"{kind}_weights"
                wanted[name] = parse_weights(words, getattr(present, name), kind)
        for name, words in (
            ("account_ceilings", self.account_ceilings),
            ("user_ceilings", self.user_ceilings),
            ("account_guarantees", self.account_guarantees),
            ("user_guarantees", self.user_guarantees),
        ):
            if words:
                wanted[name] = parse_gpus(words, getattr(present, name), name.replace("_", " "))
        if self.starvation_bound is not None:
            wanted["starvation_bound"] = _bound(self.starvation_bound)
        for name in ("gpu_counts", "remaining_work_power", "hysteresis", "partial_nodes"):
            if (value := getattr(self, name)) is not None:
                wanted[name] = value
        if not wanted:
            raise ConfigError("nothing to set: give at least one option (see --help)")
        for name, value in wanted.items():
            setting_to_json(name, value)
        if any(name.endswith(("_ceilings", "_guarantees")) for name in wanted):
            _consistent(with_values(present, wanted))
        return wanted


def with_values(present: Settings, wanted: Mapping[str, Any]) -> Settings:
    """The settings as they will be once `wanted` is set."""
    values = dict(wanted)
    if values.get("power") == "-inf":
        values["power"] = -math.inf
    return replace(present, **values)


def _consistent(settings: Settings) -> None:
    for kind, floors, ceilings in (
        ("account", settings.account_guarantees, settings.account_ceilings),
        ("user", settings.user_guarantees, settings.user_ceilings),
    ):
        for name, gpus in sorted(floors.items()):
            if gpus > ceilings.get(name, gpus):
                raise ConfigError(
                    f"{kind} {name}: the guarantee of {gpus} GPUs would be above the ceiling of {ceilings[name]}; "
                    "change one of them"
                )


def _bound(text: str) -> float | None:
    """Seconds, or None for `none`; what is no number is left for the setting's own rule to refuse."""
    if text.lower() == "none":
        return None
    try:
        return float(text)
    except ValueError:
        return math.nan


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


def parse_gpus(words: Sequence[str], present: Mapping[str, int], what: str) -> dict[str, int]:
    """`NAME=GPUS` words merged into `present`; `NAME=none` takes the entry out."""
    gpus = dict(present)
    for word in words:
        name, equals, text = word.rpartition("=")
        if equals and name and text == "none":
            gpus.pop(name, None)
        elif equals and name and text.isascii() and text.isdigit():
            gpus[name] = int(text)
        else:
            raise ConfigError(
                f"{what} are NAME=GPUS, a whole number of GPUs, or NAME=none to remove one: got {word!r}"
            )
    return gpus


def power_text(power: float) -> str:
    return "-inf (max-min)" if power == -math.inf else f"{power:g}"


def power_value(power: float) -> float | str:
    """As the database and JSON carry it: they know no infinity."""
    return "-inf" if power == -math.inf else power


def document(settings: Settings) -> dict[str, Any]:
    """Every setting, as JSON carries it."""
    values = {name: getattr(settings, name) for name in Settings.__slots__}
    sorted_maps = {k: dict(sorted(v.items())) for k, v in values.items() if isinstance(v, Mapping)}
    return values | sorted_maps | {"power": power_value(settings.power)}


def lines(settings: Settings) -> list[str]:
    """The same for people."""
    meaning = {
        1.0: "mean",
        0.0: "geometric mean",
        -1.0: "harmonic mean",
        -math.inf: "the worst-off job counts",
    }
    said = meaning.get(settings.power, "between the harmonic mean and max-min" if settings.power < -1 else "")
    bound = settings.starvation_bound
    told = (
        ("power", power_text(settings.power) + (f"  ({said})" if said else "")),
        ("account weights", _table(settings.account_weights, "all 1")),
        ("user weights", _table(settings.user_weights, "all 1")),
        ("QOS weights", _table(settings.qos_weights, "all 1")),
        ("job weights", _table(settings.job_weights, "all 1")),
        ("GPU ceilings", _limits(settings.account_ceilings, settings.user_ceilings)),
        ("GPU guarantees", _limits(settings.account_guarantees, settings.user_guarantees)),
        ("GPU counts", settings.gpu_counts),
        ("starvation bound", "none" if bound is None else f"{bound:g} s"),
        (
            "remaining work",
            f"power {settings.remaining_work_power:g}" if settings.remaining_work_power else "no matter",
        ),
        ("hysteresis", f"{settings.hysteresis:g}"),
        ("multi-node jobs", "equal parts of nodes allowed" if settings.partial_nodes else "whole nodes"),
        ("paused", "yes" if settings.paused else "no"),
    )
    return [f"{name:<16} {value}" for name, value in told]


def _table(entries: Mapping[str, float], empty: str) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in sorted(entries.items())) or empty


def _limits(accounts: Mapping[str, int], users: Mapping[str, int]) -> str:
    kinds = (("account", accounts), ("user", users))
    return ", ".join(f"{kind} {name}={n}" for kind, t in kinds for name, n in sorted(t.items())) or "none"
