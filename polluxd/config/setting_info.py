"""The declaration of each setting, for messages, options and pages, from the JSON schema of its class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from polluxd.config.settings import SECTIONS, PolicySettings
from polluxd.errors import ConfigError

Schema = Mapping[str, Any]
"""JSON schema, with the words that `polluxd.config.value_types` adds: unit, expected, metavar, run_time_only."""


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as declared."""

    section: str
    key: str
    schema: Schema
    required: bool
    default: Any
    """As JSON has it; None where the setting is required, or unset by default."""
    example: Any
    """What the example file shows where the default shows too little, else None."""
    run_time_only: str
    """The command that sets it, where polluxd.toml may not; else empty."""
    type: str
    """Its JSON type, where it is set."""
    entry_type: str
    """The JSON type of a table's values; else empty."""
    optional: bool
    """It may be unset."""
    doc: str
    expected: str
    """Which values it takes, in words."""
    metavar: str
    """What stands for a value in `--help`."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def help(self) -> str:
        """The first sentence of its documentation, for `--help`."""
        return self.doc.split(". ")[0].rstrip(".")

    @property
    def is_table(self) -> bool:
        return self.type == "object"

    def expected_at(self, path: tuple[int | str, ...]) -> str:
        """Say which values it takes at `path`: of a table, an entry or its name."""
        if not self.is_table or not path:
            return self.expected
        return f"{_name(self.schema)} as a name" if path[-1] == "[key]" else _expected(_entries(self.schema))


def declared(section: str, whole: Schema) -> tuple[SettingInfo, ...]:
    """Return the settings of a section's JSON schema, in the order of their declaration."""
    found = []
    for key, inner in whole["properties"].items():
        # What the setting itself says stays beside the definition that it refers to.
        reference = inner.get("$ref", "").rpartition("/")[2]
        schema = {**whole["$defs"][reference], **inner} if reference else inner
        kind, entries = _set(schema).get("type", ""), _entries(schema)
        found.append(
            SettingInfo(
                section,
                key,
                schema,
                required=key in whole.get("required", ()),
                default=schema.get("default", {} if kind == "object" else None),
                example=next(iter(schema.get("examples", ())), None),
                run_time_only=schema.get("run_time_only", ""),
                type=kind,
                entry_type=_set(entries)["type"] if entries else "",
                optional={"type": "null"} in schema.get("anyOf", ()),
                doc=" ".join(schema.get("description", "").split()),
                expected=_expected(schema),
                metavar=_metavar(schema),
            )
        )
    return tuple(found)


@cache
def infos(section: str) -> tuple[SettingInfo, ...]:
    return declared(section, TypeAdapter(SECTIONS[section]).json_schema())


@cache
def policy_info(key: str) -> SettingInfo:
    """Return a setting of the policy by name. Raises ConfigError."""
    known = {info.key: info for info in infos("policy")}
    if key not in known:
        raise ConfigError(f"no setting {key!r}: there are {', '.join(sorted(known))}")
    return known[key]


def _set(schema: Schema) -> Schema:
    """Return the schema of a value that is set."""
    return next(choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null")


def _entries(schema: Schema) -> Schema:
    """Return the schema of a table's values; empty where it is no table."""
    patterns = schema.get("patternProperties", {}).values()
    entries: Schema = schema.get("additionalProperties") or next(iter(patterns), {})
    return entries


def _name(schema: Schema) -> str:
    return str(schema.get("expected_name", "names"))


def _metavar(schema: Schema) -> str:
    schema = _set(schema)
    if schema["type"] == "object":
        return f"{schema.get('name_metavar', 'NAME')}={_metavar(_entries(schema))}"
    if "metavar" in schema or "unit" in schema:
        return str(schema.get("metavar") or schema["unit"].upper())
    if "enum" in schema:
        return "|".join(schema["enum"])
    return "NUMBER" if schema["type"] in ("integer", "number") else "TEXT"


def _expected(schema: Schema) -> str:
    if "expected" in schema:
        return str(schema["expected"])
    if "anyOf" in schema:
        return f"{_expected(_set(schema))}, or none"
    if "enum" in schema:
        *most, last = (f'"{choice}"' for choice in schema["enum"])
        return f"{', '.join(most)} or {last}"
    match schema["type"]:
        case "object":
            return f"a table from {_name(schema)} to {_expected(_entries(schema))}"
        case "boolean":
            return "true or false"
        case "integer" | "number" as kind:
            unit = f" of {schema['unit']}" if "unit" in schema else ""
            bounds = (f" {word} {schema[key]}" for key, word in _BOUNDS.items() if key in schema)
            return f"a {'whole ' if kind == 'integer' else ''}number{unit}{''.join(bounds)}"
        case _:
            return "text"


_BOUNDS = {"exclusiveMinimum": "above", "minimum": "from", "exclusiveMaximum": "below", "maximum": "up to"}
_POLICY = TypeAdapter(PolicySettings)


def checked(key: str, value: object) -> Any:
    """Return a value for one setting of the policy as its type has it.

    Raises:
        ConfigError: no such setting, or not a value for it; says what is expected and what came.
    """
    info = policy_info(key)
    try:
        return getattr(_POLICY.validate_python({key: value}), key)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        path = detail["loc"][1:]
        where = ".".join([key, *(str(part) for part in path[:1])]) if info.is_table else key
        expected = info.expected_at(path)
        raise ConfigError(f"setting {where}: expected {expected}, got {detail['input']!r}") from None


def policy_document(settings: PolicySettings) -> dict[str, Any]:
    """Return every setting of the policy as JSON carries it."""
    return {info.key: as_json(getattr(settings, info.key)) for info in infos("policy")}


def as_json(value: Any) -> Any:
    """Return a setting's value as JSON carries it."""
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in sorted(value.items())}
    return str(value) if value in (float("inf"), float("-inf")) else value


OPTIONS = tuple(info for info in infos("policy") if not (info.run_time_only and info.type == "boolean"))
"""The settings that are options of `polluxctl settings set`; `paused` has its own commands."""
SHORT_OPTIONS: Mapping[str, list[str]] = {"power": ["-p"], "fairness_per": ["--per"]}
"""Shorter names of options, by setting."""


def option_name(info: SettingInfo) -> str:
    """Return the option of a setting; of a table, for one entry."""
    word = info.key.replace("_", "-")
    return "--" + (word.removesuffix("s") if info.is_table else word)
