"""Convert a snapshot to JSON and back exactly.

polluxd can replay a decision bit for bit from this record.

Floats survive because JSON text carries their shortest exact form. What JSON lacks (infinities, NaN) or Postgres'
jsonb drops (the sign of a negative zero) travels as a string; jsonb writes 1e22 as a whole number, which the
declared type of the field makes a float again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from polluxd.errors import StoreRejected
from polluxd.model import Snapshot

Decoder = Callable[[Any], Any]
T = TypeVar("T")


def encode(value: Any) -> Any:
    """Return `value` as types that JSON has.

    Frozen dataclasses and named tuples become objects.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: encode(v) for k, v in value._asdict().items()}
    if isinstance(value, float):
        plain = math.isfinite(value) and (value != 0 or math.copysign(1.0, value) > 0)
        return value if plain else str(value)
    if isinstance(value, Mapping):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, frozenset):
        return sorted(encode(v) for v in value)
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    return value


def to_json(snapshot: Snapshot) -> str:
    """Return the snapshot as JSON text: what `encode` makes of it, in less.

    The encoder of the standard library walks the snapshot; Python code sees each dataclass once. A field is left out
    where its value is its default and says nothing (None, False, empty): `decode_snapshot` fills it in.
    """
    try:
        text = json.dumps(snapshot, default=_members, allow_nan=False, separators=(",", ":"))
    except ValueError:  # a number is not finite
        return json.dumps(encode(snapshot))
    negative_zero = any(before + "-0.0" in text for before in ":,[")
    return json.dumps(encode(snapshot)) if negative_zero else text


def _members(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has, one level deep."""
    if not is_dataclass(value) or isinstance(value, type):
        return encode(value)
    names, read, blanks, named = _fields(type(value))
    members = {n: v for n, v, blank in zip(names, read(value), blanks, strict=True) if v is not blank}
    for name in named:
        if name in members:
            inner: Any = members[name]
            members[name] = inner._asdict() if hasattr(inner, "_asdict") else encode(inner)
    return members


class _Fields(NamedTuple):
    """The fields of a dataclass."""

    names: tuple[str, ...]
    read: Callable[[Any], tuple[Any, ...]]
    """Returns their values."""
    blanks: tuple[Any, ...]
    """Defaults that need not be written; of other fields an object that no value is."""
    named: tuple[str, ...]
    """Fields of named tuples, which JSON would take for lists."""


@cache
def _fields(kind: type[Any]) -> _Fields:
    hints, found = get_type_hints(kind), fields(kind)
    names = tuple(f.name for f in found)
    # Of one name the reader would return no tuple.
    assert len(names) > 1, kind
    blanks = (f.default if any(f.default is b for b in (None, False, "", ())) else MISSING for f in found)
    named = tuple(name for name in names if _has_named_tuple(hints[name]))
    return _Fields(names, attrgetter(*names), tuple(blanks), named)


def _has_named_tuple(hint: Any) -> bool:
    if isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
        return True
    return any(map(_has_named_tuple, get_args(hint)))


def decode(kind: type[T], data: Any) -> T:
    """Return the frozen value that `encode` of this or another version wrote.

    A field that was added later gets its default. A field that this version does not know is ignored.

    Raises:
        StoreRejected: `data` is no such value; the message says which field is missing or has a wrong type.
    """
    try:
        found: T = _decoder(cast(Any, kind))(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreRejected(f"the stored {kind.__name__.lower()} cannot be read: {error}") from error
    return found


def decode_snapshot(data: Any) -> Snapshot:
    """Return a snapshot; see `decode`. Raises StoreRejected."""
    return decode(Snapshot, data)


@cache
def _decoder(kind: Any) -> Decoder:
    """Return the function that converts decoded JSON to the declared type.

    polluxd builds each decoder once per type.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return _optional(arguments)
    if origin is Literal:
        return _scalar(type(arguments[0]))
    if origin is tuple:
        return _sequence(tuple, _decoder(arguments[0]))
    if origin is frozenset:
        return _sequence(frozenset, _decoder(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        inner = _decoder(arguments[1])
        return lambda value: {str(k): inner(v) for k, v in value.items()}
    if is_dataclass(kind):
        required = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
        return _record(kind, required)
    if issubclass(kind, tuple):
        return _record(kind, set(kind._fields) - set(kind._field_defaults))
    return _scalar(kind)


def _optional(arguments: tuple[Any, ...]) -> Decoder:
    (kind,) = (a for a in arguments if a is not NoneType)
    inner = _decoder(kind)
    return lambda value: None if value is None else inner(value)


def _sequence(make: Callable[[Any], Any], inner: Decoder) -> Decoder:
    def decode(value: Any) -> Any:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, got {value!r}")
        return make(inner(v) for v in value)

    return decode


def _record(kind: Any, required: set[str]) -> Decoder:
    """For a dataclass or a named tuple."""
    inner = {name: _decoder(hint) for name, hint in get_type_hints(kind).items()}

    def decode(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise TypeError(f"expected an object for {kind.__name__}, got {value!r}")
        if missing := required - value.keys():
            raise ValueError(f"{kind.__name__} lacks {', '.join(sorted(missing))}")
        return kind(**{name: read(value[name]) for name, read in inner.items() if name in value})

    return decode


def _scalar(kind: Any) -> Decoder:
    accepted = (int, float, str) if kind is float else kind

    def decode(value: Any) -> Any:
        if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"expected {kind.__name__}, got {value!r}")
        return kind(value)

    return decode
