"""The declaration of each setting, for messages, options and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from polluxd.config.cloud_settings import CloudSettings
from polluxd.config.settings import SECTIONS, PolicySettings
from polluxd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as declared."""

    section: str
    key: str
    schema: Mapping[str, Any]
    """Its JSON schema, with the words that `polluxd.config.settings` adds: unit, expected, metavar, run_time_only."""
    required: bool

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def doc(self) -> str:
        return " ".join(self.schema.get("description", "").split())

    @property
    def help(self) -> str:
        """The first sentence of its documentation, for `--help`."""
        return self.doc.split(". ")[0].rstrip(".")

    @property
    def default(self) -> Any:
        """As JSON has it; None where the setting is required."""
        return self.schema.get("default", {} if self.is_table else None)

    @property
    def example(self) -> Any:
        """What the example file shows where the default shows too little, else None."""
        return next(iter(self.schema.get("examples", ())), None)

    @property
    def run_time_only(self) -> str:
        """The command that sets it, where polluxd.toml may not; else empty."""
        return str(self.schema.get("run_time_only", ""))

    @property
    def expected(self) -> str:
        """Which values it takes, in words."""
        return _expected(self.schema)

    @property
    def metavar(self) -> str:
        """What stands for a value in `--help`."""
        return _metavar(self.schema)

    @property
    def is_table(self) -> bool:
        return self.type == "object"

    @property
    def is_switch(self) -> bool:
        return self.type == "boolean"

    @property
    def optional(self) -> bool:
        """It may be unset."""
        return {"type": "null"} in self.schema.get("anyOf", ())

    @property
    def type(self) -> str:
        """Its JSON type, where it is set."""
        return _type(self.schema)

    @property
    def entry_type(self) -> str:
        """The JSON type of a table's values."""
        return _type(_entries(self.schema))

    def expected_at(self, path: tuple[int | str, ...]) -> str:
        """Say which values it takes at `path`: of a table, an entry or its name."""
        if not self.is_table or not path:
            return self.expected
        return f"{_name(self.schema)} as a name" if path[-1] == "[key]" else _expected(_entries(self.schema))


def declared(section: str, schema: Mapping[str, Any]) -> tuple[SettingInfo, ...]:
    """Return the settings of a section's JSON schema, in the order of their declaration."""
    return tuple(
        SettingInfo(section, key, _resolved(inner, schema), key in schema.get("required", ()))
        for key, inner in schema["properties"].items()
    )


@cache
def infos(section: str) -> tuple[SettingInfo, ...]:
    """Return the settings of one section."""
    found = declared(section, TypeAdapter(SECTIONS[section]).json_schema())
    if section != "policy":
        return found
    # pydantic finds docstrings in the class that declares the fields alone.
    inherited = declared(section, TypeAdapter(CloudSettings).json_schema())
    return (*found[len(inherited) :], *inherited)


@cache
def policy_info(key: str) -> SettingInfo:
    """Return a setting of the policy by name. Raises ConfigError."""
    for info in infos("policy"):
        if info.key == key:
            return info
    known = ", ".join(sorted(info.key for info in infos("policy")))
    raise ConfigError(f"no setting {key!r}: there are {known}")


def _resolved(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> Mapping[str, Any]:
    """Put the definition that a schema refers to into it; what the schema says itself stays."""
    name = schema.get("$ref", "").rpartition("/")[2]
    return {**whole["$defs"][name], **schema} if name else schema


def _choices(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas of a value that is set."""
    return [choice for choice in schema.get("anyOf", [schema]) if choice.get("type") != "null"]


def _type(schema: Mapping[str, Any]) -> str:
    return str(_choices(schema)[0].get("type", ""))


def _entries(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema of a table's values."""
    entries: Mapping[str, Any] = schema.get("additionalProperties") or next(
        iter(schema.get("patternProperties", {}).values()), {}
    )
    return entries


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema.get("expected_name", "names"))


def _metavar(schema: Mapping[str, Any]) -> str:
    schema = _choices(schema)[0]
    if schema["type"] == "object":
        return f"{schema.get('name_metavar', 'NAME')}={_metavar(_entries(schema))}"
    if "metavar" in schema or "unit" in schema:
        return str(schema.get("metavar") or schema["unit"].upper())
    if "enum" in schema:
        return "|".join(schema["enum"])
    return "NUMBER" if schema["type"] in ("integer", "number") else "TEXT"


def _expected(schema: Mapping[str, Any]) -> str:
    if "expected" in schema:
        return str(schema["expected"])
    if "anyOf" in schema:
        return " or ".join(map(_expected, _choices(schema))) + ", or none"
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
        raise ConfigError(
            f"setting {where}: expected {info.expected_at(path)}, got {detail['input']!r}"
        ) from None


def policy_document(settings: PolicySettings) -> dict[str, Any]:
    """Return every setting of the policy as JSON carries it."""
    return {info.key: as_json(getattr(settings, info.key)) for info in infos("policy")}


def as_json(value: Any) -> Any:
    """Return a setting's value as JSON carries it."""
    if isinstance(value, Mapping):
        return {name: as_json(inner) for name, inner in sorted(value.items())}
    return str(value) if value in (float("inf"), float("-inf")) else value


OPTIONS: tuple[SettingInfo, ...] = tuple(
    info for info in infos("policy") if not (info.run_time_only and info.is_switch)
)
"""The settings that are options of `polluxctl settings set`; `paused` has its own commands."""
SHORT_OPTIONS: Mapping[str, list[str]] = {"power": ["-p"], "fairness_per": ["--per"]}
"""Shorter names of options, by setting."""


def option_name(info: SettingInfo) -> str:
    """Return the option of a setting; of a table, for one entry."""
    word = info.key.replace("_", "-")
    return "--" + (word.removesuffix("s") if info.is_table else word)
