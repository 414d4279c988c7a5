"""Convert a snapshot to JSON and back exactly.

polluxd can replay a decision bit for bit from this record.

Floats survive because JSON text carries their shortest exact form. What JSON lacks (infinities, NaN) or Postgres'
jsonb drops (the sign of a negative zero) travels as a string; jsonb writes 1e22 as a whole number, which the
declared type of the field makes a float again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from polluxd.errors import StoreRejected
from polluxd.model import Snapshot

Decoder = Callable[[Any], Any]


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


def decode_snapshot(data: Any) -> Snapshot:
    """Return the snapshot that `encode` of this or another version wrote.

    A field that was added later gets its default. A field that this version does not know is ignored.

    Raises:
        StoreRejected: `data` is no snapshot; the message says which field is missing or has a wrong type.
    """
    try:
        found = _decoder(Snapshot)(data)
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreRejected(f"the stored snapshot cannot be read: {error}") from error
    assert isinstance(found, Snapshot)
    return found


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
