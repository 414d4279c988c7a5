"""The declaration of each setting, for messages, options and pages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from polluxd.errors import ConfigError
from polluxd.settings import SECTIONS, Example, Expected, PolicySettings, RunTimeOnly, Unit


@dataclass(frozen=True, slots=True)
class SettingInfo:
    """One setting as declared."""

    section: str
    key: str
    kind: Any
    """Its annotated type."""
    doc: str
    default: Any
    """None where the setting is required; see `required`."""
    required: bool
    example: Any
    """What the example file shows where the default shows too little, else None."""
    run_time_only: str
    """The command that sets it, where polluxd.toml may not; else empty."""

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}" if self.section else self.key

    @property
    def help(self) -> str:
        """The first sentence of its documentation, for `--help`."""
        return self.doc.split(". ")[0].rstrip(".")

    @property
    def expected(self) -> str:
        return expected(self.kind)

    @property
    def is_table(self) -> bool:
        return table_kinds(self.kind) is not None

    @property
    def optional(self) -> bool:
        """It may be unset."""
        return NoneType in get_args(_metadata(self.kind)[0])


def declared(section: str, attribute: str, kind: Any, field: FieldInfo) -> SettingInfo:
    """Return what one field of a section declares."""
    factory: Any = field.default_factory
    default = factory() if factory is not None else field.default
    said = _metadata(kind)[1]
    return SettingInfo(
        section=section,
        key=field.alias or attribute,
        kind=kind,
        doc=" ".join((field.description or "").split()),
        default=None if default is PydanticUndefined else default,
        required=default is PydanticUndefined,
        example=next((mark.value for mark in said if isinstance(mark, Example)), None),
        run_time_only=next((mark.command for mark in said if isinstance(mark, RunTimeOnly)), ""),
    )


@cache
def infos(section: str) -> tuple[SettingInfo, ...]:
    """Return the settings of one section, in the order of their declaration."""
    kinds = get_type_hints(SECTIONS[section], include_extras=True)
    fields: Mapping[str, FieldInfo] = SECTIONS[section].__pydantic_fields__
    return tuple(declared(section, name, kinds[name], field) for name, field in fields.items())


@cache
def policy_info(key: str) -> SettingInfo:
    """Return a setting of the policy by name. Raises ConfigError."""
    for info in infos("policy"):
        if info.key == key:
            return info
    known = ", ".join(sorted(info.key for info in infos("policy")))
    raise ConfigError(f"no setting {key!r}: there are {known}")


def _metadata(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """Split an annotated type into the type and what is said about it."""
    if get_origin(kind) is Annotated:
        inner, *said = get_args(kind)
        return inner, tuple(said)
    return kind, ()


def table_kinds(kind: Any) -> tuple[Any, Any] | None:
    """Return the types of names and values where `kind` is a table, else None."""
    inner, _ = _metadata(kind)
    origin = get_origin(inner)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        name, value = get_args(inner)
        return name, value
    return None


def base_type(kind: Any) -> Any:
    """Return the plain type under annotations and `| None`."""
    inner, _ = _metadata(kind)
    if get_origin(inner) in (Union, UnionType):
        return base_type(next(k for k in get_args(inner) if k is not NoneType))
    return inner


def metavar(kind: Any) -> str:
    """Return the word that stands for a value in `--help`."""
    if (table := table_kinds(kind)) is not None:
        name, value = table
        return f"{'NAME' if name is str else metavar(name)}={metavar(value)}"
    inner, said = _metadata(kind)
    if get_origin(inner) in (Union, UnionType):
        return metavar(next(k for k in get_args(inner) if k is not NoneType))
    for mark in said:
        if isinstance(mark, Expected):
            return mark.metavar
        if isinstance(mark, Unit):
            return mark.name.upper()
    if get_origin(inner) is Literal:
        return "|".join(str(choice) for choice in get_args(inner))
    return "NUMBER" if inner in (int, float) else "TEXT"


def expected(kind: Any) -> str:
    """Say in words which values a type takes."""
    inner, said = _metadata(kind)
    for mark in said:
        if isinstance(mark, Expected):
            return mark.words
    if get_origin(inner) in (Union, UnionType):
        kinds = [expected(k) for k in get_args(inner) if k is not NoneType]
        return " or ".join(kinds) + (", or none" if NoneType in get_args(inner) else "")
    if (table := table_kinds(inner)) is not None:
        name, value = table
        return f"a table from {'names' if name is str else expected(name)} to {expected(value)}"
    if get_origin(inner) is Literal:
        return _one_of(get_args(inner))
    if isinstance(inner, type) and issubclass(inner, Enum):
        return _one_of(member.value for member in inner)
    if inner is bool:
        return "true or false"
    if inner is str:
        return "text"
    unit = next((f" of {m.name}" for m in said if isinstance(m, Unit)), "")
    return f"a {'whole ' if inner is int else ''}number{unit}{_range(said)}"


def _one_of(choices: Iterable[object]) -> str:
    *most, last = (f'"{choice}"' for choice in choices)
    return f"{', '.join(most)} or {last}" if most else last


def _range(said: tuple[Any, ...]) -> str:
    bounds = []
    for mark in said:
        match mark:
            case Gt(gt=low):
                bounds.append(f"above {low}")
            case Ge(ge=low):
                bounds.append(f"from {low}")
            case Lt(lt=high):
                bounds.append(f"below {high}")
            case Le(le=high):
                bounds.append(f"up to {high}")
    return "".join(f" {bound}" for bound in bounds)


def expected_at(kind: Any, path: tuple[int | str, ...]) -> str:
    """Say which values a table takes at `path`: an entry or its name."""
    table = table_kinds(kind)
    if table is None or not path:
        return expected(kind)
    return f"{expected(table[0])} as a name" if path[-1] == "[key]" else expected(table[1])


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    return TypeAdapter(policy_info(key).kind)


def checked(key: str, value: object) -> Any:
    """Return a value for one setting of the policy as its type has it.

    Raises:
        ConfigError: no such setting, or not a value for it; says what is expected and what came.
    """
    info = policy_info(key)
    try:
        return _adapter(key).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join([key, *(str(part) for part in detail["loc"][:1])]) if info.is_table else key
        raise ConfigError(
            f"setting {where}: expected {expected_at(info.kind, detail['loc'])}, got {detail['input']!r}"
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
    info for info in infos("policy") if not (info.run_time_only and base_type(info.kind) is bool)
)
"""The settings that are options of `polluxctl settings set`; `paused` has its own commands."""
SHORT_OPTIONS: Mapping[str, list[str]] = {"power": ["-p"], "fairness_per": ["--per"]}
"""Shorter names of options, by setting."""


def option_name(info: SettingInfo) -> str:
    """Return the option of a setting; of a table, for one entry."""
    word = info.key.replace("_", "-")
    return "--" + (word.removesuffix("s") if info.is_table else word)
