"""The sliders of the settings' page. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from polluxd.config.setting_info import option_name, policy_info
from polluxd.config.settings import PolicySettings

from ..settings import Given, in_words

_ACCOUNTS = 12
"""Accounts that have a slider; more would fill the page."""
Control = dict[str, Any]
"""One slider, or a list of choices. `name` is its form's field: the setting, and for a weight the account behind a
colon. `untouched` is what the form sends of a control that nobody moved."""


def controls(present: PolicySettings, accounts: Sequence[str], given: Mapping[str, str]) -> list[Control]:
    """Return the controls, at the values of a form where it has them."""
    objective = {"name": "objective", "title": "objective", "now": present.objective}
    weights = [
        _slider(
            f"account_weights:{name}", f"weight of {name}", present.account_weights.get(name, 1.0), 0.25, 4
        )
        for name in accounts[:_ACCOUNTS]
    ]
    found = [
        {**objective, "untouched": present.objective, "choices": policy_info("objective").schema["enum"]},
        _slider("kappa", "kappa (completion-time)", present.kappa, 1.0, 10.0),
        _slider("power", "power (fair-share)", present.power, -10.0, 1.0),
        *weights,
    ]
    return [control | {"value": given.get(control["name"], control["untouched"])} for control in found]


def _slider(name: str, title: str, now: float, least: float, most: float) -> Control:
    shown = min(max(now, least), most) if math.isinf(now) else now
    bounds = {"least": min(least, shown), "most": max(most, shown), "choices": ()}
    return {"name": name, "title": title, "now": in_words(now), "untouched": in_words(shown), **bounds}


def options(found: Sequence[Control]) -> dict[str, Given]:
    """Return the settings that a form changes, as `changes` takes them."""
    moved = {
        control["name"]: control["value"] for control in found if control["value"] != control["untouched"]
    }
    weights = [f"{name.partition(':')[2]}={value}" for name, value in moved.items() if ":" in name]
    wanted: dict[str, Given] = {name: value for name, value in moved.items() if ":" not in name}
    return wanted | ({"account_weights": weights} if weights else {})


def command(found: Mapping[str, Given]) -> str:
    """Return the command that would set the options."""
    argv = ["polluxctl", "settings", "set"]
    for key, value in found.items():
        entries = [value] if isinstance(value, str) else value if isinstance(value, list) else []
        for entry in entries:
            argv += [option_name(policy_info(key)), entry]
    return shlex.join(argv)
