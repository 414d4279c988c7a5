"""A scenario file: what `polluxctl simulate` assumes of the cluster."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pollux.private_folder import read_named
from polluxd.errors import ConfigError
from polluxd.sim.cluster import Scenario

_SCENARIO = TypeAdapter(Scenario)


def read_scenario(path: Path | None, given: Mapping[str, Any]) -> Scenario:
    """Return the scenario of a TOML file, with the values of options in place of the file's.

    Args:
        path: none: the defaults.
        given: values by key; of a table, a mapping. None: not given.

    Raises:
        ConfigError: unreadable, not TOML, or not a scenario: one line per fault, with key and value.
    """
    document = {} if path is None else _read(path)
    for key, value in given.items():
        if isinstance(value, Mapping):
            table = document.setdefault(key, {})
            if isinstance(table, dict):
                table |= {name: entry for name, entry in value.items() if entry is not None}
        elif value is not None:
            document[key] = value
    return parse_scenario(document, "simulate" if path is None else str(path))


def parse_scenario(document: Mapping[str, Any], origin: str) -> Scenario:
    """Check a decoded document, named `origin`. Raises ConfigError."""
    try:
        # Strict, so that "16" is no number. A list may stand for a tuple in JSON alone.
        return _SCENARIO.validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        faults = [_fault(detail) for detail in error.errors(include_url=False)]
        raise ConfigError("\n".join(f"{origin}: {fault}" for fault in faults)) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_named(path).decode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); check the path") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _fault(detail: ErrorDetails) -> str:
    key = ".".join(str(part) for part in detail["loc"])
    match detail["type"]:
        case "unexpected_keyword_argument":
            return f"{key}: no such key; the scenario's page in the documentation lists the keys"
        case "missing" | "missing_argument":
            return f"{key}: missing; it must be given"
        case "value_error":
            message = detail["msg"].removeprefix("Value error, ")
            return f"{key}: {message}" if key else message
        case _:
            wanted = detail["msg"].replace("Input should", "the value should").replace("an object", "a table")
            return f"{key}: {wanted}, got {detail['input']!r}"
