"""Convert training state to JSON and tensors, and back, without pickle.

Ranks exchange values in this form, and checkpoints store them in it. Reading it never runs code. Supported values:

    None, bool, int, float, complex, str, bytes       list, tuple, set, frozenset
    dict, OrderedDict, Counter                         torch.Tensor, torch.Size, torch.dtype, torch.device
    numpy numbers and arrays of numbers                the agent's own records (BatchLimits, NoiseScale)

Any other object is refused with a StateError that names its place in the state. In JSON, null, booleans, numbers and
text stand for themselves; every other value is a list whose first item names its kind.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pollux.errors import StateError
from pollux.goodput import BatchLimits, NoiseScale

_LISTS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_RECORDS: dict[str, type] = {"BatchLimits": BatchLimits, "NoiseScale": NoiseScale}
_NUMBERS = "?biufc"  # kinds of numpy's dtypes that hold numbers alone


def encode(value: Any, put: Callable[[Tensor], Any], place: str = "state") -> Any:
    """Return `value` as JSON.

    `put` takes each tensor and returns the JSON that stands for it.

    `place` names the value in messages. Raises StateError for an unsupported object.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return ["tensor", put(value)]
    if kind in _LISTS.values():
        return [kind.__name__, [encode(item, put, f"{place}[{index}]") for index, item in enumerate(value)]]
    if kind in (dict, OrderedDict, Counter):
        return _encode_mapping(value, put, place)
    if kind is complex:
        return ["complex", value.real, value.imag]
    if kind in (bytes, bytearray):
        return [kind.__name__, base64.b64encode(value).decode()]
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
        return _encode_array(value, put)
    if kind is torch.Size:
        return ["size", list(value)]
    if kind in (torch.dtype, torch.device):
        return [kind.__name__, str(value).removeprefix("torch.")]
    if kind in _RECORDS.values():
        items = [encode(getattr(value, name), put, f"{place}.{name}") for name in kind.__annotations__]
        return ["record", kind.__name__, items]
    raise StateError(
        f"{place} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold: return only numbers, "
        "text, lists, dictionaries, numpy arrays and tensors from state_dict(), and rebuild other objects in "
        "load_state_dict()"
    )


def decode(raw: Any, get: Callable[[Any], Tensor]) -> Any:
    """Return the value that `encode` made `raw` of.

    `get` returns the tensor that a placeholder stands for.

    Raises ValueError for anything that `encode` does not produce.
    """
    if raw is None or isinstance(raw, bool | int | float | str):
        return raw
    try:
        return _decode_tagged(raw, get)
    except (TypeError, KeyError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"not a value in this format: {error!r:.200}") from error


def _decode_tagged(raw: Any, get: Callable[[Any], Tensor]) -> Any:
    match raw:
        case ["tensor", place]:
            return get(place)
        case ["list" | "tuple" | "set" | "frozenset" as kind, [*items]]:
            return _LISTS[kind](decode(item, get) for item in items)
        case ["dict" | "OrderedDict" | "Counter", [*_], _]:
            return _decode_mapping(raw, get)
        case ["complex", int() | float() as real, int() | float() as imaginary]:
            return complex(real, imaginary)
        case ["bytes" | "bytearray" as kind, str(text)]:
            content = base64.b64decode(text, validate=True)
            return content if kind == "bytes" else bytearray(content)
        case ["array" | "number" as kind, str(name), [*shape], place]:
            return _decode_array(kind, name, shape, get(place))
        case ["size", [*lengths]]:
            return torch.Size(lengths)
        case ["dtype", str(name)] if isinstance(found := getattr(torch, name), torch.dtype):
            return found
        case ["device", str(name)]:
            return torch.device(name)
        case ["record", str(name), [*items]]:
            return _RECORDS[name](*(decode(item, get) for item in items))
    raise ValueError(f"not a value in this format: {raw!r:.200}")


def dumps(value: Any, place: str = "state") -> bytes:
    """Return `value` as text of JSON with its tensors inside, in base64. For small values. Raises StateError."""

    def put(tensor: Tensor) -> Any:
        whole = tensor.detach().cpu().contiguous()
        raw = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(whole.dtype).removeprefix("torch."), list(whole.shape), base64.b64encode(raw).decode()]

    return json.dumps(encode(value, put, place)).encode()


def loads(text: bytes) -> Any:
    """Return the value that `dumps` made `text` of, tensors on CPU. Raises ValueError."""

    def get(place: Any) -> Tensor:
        match place:
            case [str(name), [*shape], str(content)]:
                raw = bytearray(base64.b64decode(content, validate=True))
                kind = getattr(torch, name)
                if not isinstance(kind, torch.dtype):
                    raise ValueError(f"expected a dtype of torch, got {name!r:.50}")
                flat = torch.frombuffer(raw, dtype=kind) if raw else torch.empty(0, dtype=kind)
                return flat.reshape(_lengths(shape))
        raise ValueError(f"not a tensor in this format: {place!r:.200}")

    try:
        return decode(json.loads(text), get)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _encode_mapping(value: Any, put: Callable[[Tensor], Any], place: str) -> Any:
    kind = type(value)
    pairs = [
        [encode(key, put, f"a key of {place}"), encode(item, put, f"{place}[{key!r:.80}]")]
        for key, item in value.items()
    ]
    more: Any = None
    if kind is OrderedDict:
        # torch's modules attach the versions of their parts here, for load_state_dict.
        more = encode(vars(value), put, f"the attributes of {place}")
    return [kind.__name__, pairs, more]


def _decode_mapping(raw: list[Any], get: Callable[[Any], Tensor]) -> Any:
    kind, pairs, more = raw
    items = [(decode(key, get), decode(item, get)) for key, item in pairs]
    if kind != "OrderedDict":
        return dict(items) if kind == "dict" else Counter(dict(items))
    made = OrderedDict(items)
    attributes = decode(more, get)
    if not isinstance(attributes, dict) or not attributes.keys() <= {"_metadata"}:
        raise ValueError(f"expected an OrderedDict to have no attribute but _metadata, got {more!r:.200}")
    vars(made).update(attributes)
    return made


def _encode_array(value: Any, put: Callable[[Tensor], Any]) -> Any:
    kind = "array" if isinstance(value, np.ndarray) else "number"
    array = np.ascontiguousarray(value)
    raw = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
    return [kind, array.dtype.str, list(np.shape(value)), put(raw)]


def _decode_array(kind: str, name: str, shape: list[Any], raw: Tensor) -> Any:
    dtype = np.dtype(name)
    if dtype.kind not in _NUMBERS or raw.dtype is not torch.uint8:
        raise ValueError(f"expected numbers in an array, got {name!r:.50}")
    array = raw.reshape(-1).numpy().view(dtype).reshape(_lengths(shape))
    return array if kind == "array" else array[()]


def _lengths(shape: list[Any]) -> list[int]:
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"expected the lengths of a tensor's axes, got {shape!r:.200}")
    return shape
