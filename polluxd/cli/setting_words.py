"""Policy settings on the command line. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from polluxd.config.setting_info import (
    OPTIONS,
    SettingInfo,
    as_json,
    checked,
    infos,
    option_name,
)
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError

Given = str | bool | Sequence[str]
"""What the command line gives for one setting: text, a switch, or NAME=VALUE options."""


def changes(options: Mapping[str, Given | None], present: PolicySettings) -> dict[str, Any]:
    """Return the new values of the settings that were given, by name; checked.

    Raises:
        ConfigError: no setting was given, a value is out of range, or two values contradict each other.
    """
    wanted = {
        info.key: checked(info.key, _value(info, given, present))
        for info in OPTIONS
        if (given := options.get(info.key)) is not None and given != []
    }
    if not wanted:
        raise ConfigError("nothing to set: give at least one option (see --help)")
    if any(name.endswith(("_ceilings", "_guarantees")) for name in wanted):
        for conflict in replace(present, **wanted).conflicts():
            raise ConfigError(f"{conflict}; change one of them")
    return wanted


def _value(info: SettingInfo, given: Given, present: PolicySettings) -> Any:
    if isinstance(given, bool):
        return given
    if info.is_table:
        return _merged(info, given, getattr(present, info.key))
    assert isinstance(given, str)
    if info.optional and given.lower() == "none":
        return None
    return number_or_text(given, info.type)


def _merged(info: SettingInfo, given: Sequence[str], present: Mapping[str, Any]) -> dict[str, Any]:
    """Merge NAME=VALUE options into the present table; none removes."""
    entries = dict(present)
    for word in given:
        name, equals, text = word.rpartition("=")
        if not (equals and name and text):
            raise ConfigError(
                f"{option_name(info)}: expected {info.metavar}, or NAME=none to remove an entry, got {word!r}"
            )
        if text == "none":
            entries.pop(name, None)
        else:
            entries[name] = number_or_text(text, info.entry_type)
    return entries


def number_or_text(text: str, kind: str) -> Any:
    """Return `text` as a number of this JSON type where it is one, else unchanged.

    The setting's own check then refuses what is no number.
    """
    try:
        return {"integer": int, "number": float}.get(kind, str)(text)
    except ValueError:
        return text


def rows(settings: PolicySettings) -> list[dict[str, str]]:
    """Return one row per setting for `polluxctl settings get`."""
    return [
        {"name": info.key, "value": in_words(getattr(settings, info.key)), "help": info.help}
        for info in infos("policy")
    ]


def in_words(value: Any) -> str:
    """Return a setting's value as people read and type it."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name}={in_words(inner)}" for name, inner in sorted(value.items())) or "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:g}"
    return "none" if value is None else str(as_json(value))
