"""The sliders of the settings' page. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polluxd.config.setting_info import option_name, policy_info
from polluxd.config.settings import PolicySettings

from ..settings import Given, in_words

_ACCOUNTS = 12
"""Accounts that have a slider; more would fill the page."""


@dataclass(frozen=True, slots=True)
class Control:
    """One slider, or a list of choices."""

    name: str
    """Of its form's field: the setting, and for a weight the account behind a colon."""
    title: str
    value: str
    present: str
    choices: tuple[str, ...] = ()
    least: float = 0.0
    most: float = 0.0
    step: float = 0.0


def controls(present: PolicySettings, accounts: Sequence[str]) -> list[Control]:
    """Return the controls at the present settings."""
    weights = [
        _control(
            f"account_weights:{name}", f"weight of {name}", present.account_weights.get(name, 1.0), 0.25, 4
        )
        for name in accounts[:_ACCOUNTS]
    ]
    objective = present.objective
    kinds = tuple(policy_info("objective").schema["enum"])
    return [
        Control("objective", "objective", objective, objective, kinds),
        _control("kappa", "kappa (completion-time)", present.kappa, 1.0, 10.0),
        _control("power", "power (fair-share)", present.power, -10.0, 1.0),
        *weights,
    ]


def _control(name: str, title: str, value: float, least: float, most: float) -> Control:
    text = in_words(min(max(value, least), most))
    return Control(name, title, text, text, (), min(least, value), max(most, value), 0.25)


def moved(found: Sequence[Control], given: Mapping[str, str]) -> list[Control]:
    """Return the controls at the values of a form."""
    return [replace(control, value=given.get(control.name, control.value)) for control in found]


def options(found: Sequence[Control], given: Mapping[str, str]) -> dict[str, Given]:
    """Return the settings that a form changes, as `changes` takes them."""
    wanted: dict[str, Given] = {}
    weights = []
    for control in found:
        value = given.get(control.name, control.present)
        key, _, account = control.name.partition(":")
        if value == control.present:
            continue
        if account:
            weights.append(f"{account}={value}")
        else:
            wanted[key] = value
    return wanted | ({"account_weights": weights} if weights else {})


def command(found: Mapping[str, Given]) -> str:
    """Return the command that would set the options."""
    argv = ["polluxctl", "settings", "set"]
    for key, value in found.items():
        entries = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        for entry in entries:
            argv += [option_name(policy_info(key)), entry]
    return shlex.join(argv)
