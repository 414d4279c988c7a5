"""The example file, and how reference pages show a setting (`docs/generate.py`, `contrib/man/generate.py`)."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from polluxd.config.config_file import mode
from polluxd.config.setting_info import SettingInfo, infos
from polluxd.config.settings import SECTIONS

_UNCOMMENTED = {"mode", "slurm.heartbeat_file"}
"""Keys that the packaged file sets although they are not required."""

_INTRODUCTION = """\
polluxd's configuration: /etc/pollux/polluxd.toml, owned by root:pollux, mode 0640 (0600 where it holds a password).
A commented-out key shows its default, or an example where there is none. `polluxd check` names every fault.
`systemctl reload polluxd` makes polluxd read the file again. Values in [policy] are defaults:
`polluxctl settings set` overrides them at run time."""


def in_file(section: str) -> Iterator[SettingInfo]:
    """Yield the settings of a section that polluxd.toml may hold."""
    return (info for info in infos(section) if not info.run_time_only)


def about(section: str) -> str:
    """Return what the docstring of a section says, as one paragraph."""
    return " ".join(SECTIONS[section].__doc__.split())


def toml_value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
        case Mapping():
            inner = ", ".join(f"{name} = {toml_value(entry)}" for name, entry in value.items())
            return f"{{ {inner} }}" if inner else "{}"
        case list() | tuple():
            return f"[{', '.join(toml_value(entry) for entry in value)}]"
        case int() | float():
            return repr(value)
        case _:
            return json.dumps(str(value))


def default_in_words(info: SettingInfo) -> str:
    """Return the default as a reference page names it."""
    if info.required:
        return "required"
    return "none" if info.default is None or info.default == {} else toml_value(info.default)


def example_file() -> str:
    """Return polluxd.toml with every key: comments begin with `# `, commented-out keys with `#` alone."""
    lines = [_comment(_INTRODUCTION), "", *_example(mode())]
    for section in SECTIONS:
        lines += ["", f"[{section}]", _comment(about(section))]
        for info in in_file(section):
            lines += ["", *_example(info)]
    return "\n".join(lines) + "\n"


def _comment(text: str) -> str:
    return "\n".join(
        line
        for paragraph in text.strip().splitlines()
        for line in textwrap.wrap(paragraph, 118, initial_indent="# ", subsequent_indent="# ")
    )


def _example(info: SettingInfo) -> list[str]:
    mark = "" if info.required or info.name in _UNCOMMENTED else "#"
    default = "" if info.example is None or info.required else f" Default: {default_in_words(info)}."
    shown = toml_value(info.default if info.example is None else info.example)
    return [_comment(f"{info.doc}\nValue: {info.expected}.{default}"), f"{mark}{info.key} = {shown}"]
