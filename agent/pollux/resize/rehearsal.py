"""Compile a joiner's model before the other ranks wait for it.

A model that is compiled before `attach` compiles in its first pass, which takes from seconds to minutes. A joiner does
not know what the script passes to the model. So each rank notes the shapes of the newest call, and rank 0 writes them
into the companion's file. The joiner then makes one pass with zeros of these shapes before it says that it is ready.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pollux.ranks.torch_internals import is_compiled

logger = logging.getLogger("pollux")


class NewestCall:
    """Arguments of a wrapped model in its newest training pass. Only those of a compiled model are noted."""

    def __init__(self, wrapper: torch.nn.Module, module: torch.nn.Module) -> None:
        self.shapes: Any = None
        """Shapes and types, as JSON; None if there are none yet, or if JSON cannot describe them."""
        if wrapper is not module and is_compiled(module):
            wrapper.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, wrapper: torch.nn.Module, inputs: Any, options: Any) -> None:
        if not (wrapper.training and torch.is_grad_enabled()):
            return
        try:
            self.shapes = {
                "inputs": _described(list(inputs)),
                "options": _described(options),
                "autocast": _autocast(),
            }
        except TypeError:
            self.shapes = None


def rehearse(model: torch.nn.Module, call: Any) -> None:
    """Make one pass with zeros, shaped as in `call`, which changes nothing else."""
    if call is None:
        return
    parameters, buffers = list(model.parameters()), [(b, b.detach().clone()) for b in model.buffers()]
    device = parameters[0].device
    try:
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            _same_autocast(call["autocast"]),
        ):
            found = model(*_zeros(call["inputs"], device), **_zeros(call["options"], device))
            outputs = [t for t in _tensors(found) if t.requires_grad]
            torch.autograd.backward([t.float().sum() for t in outputs])
    except Exception as error:  # whatever the model does with zeros: it then compiles in its first pass
        logger.warning(
            "this rank compiles its model while the others wait: %s: %s", type(error).__name__, error
        )
    finally:
        for parameter in parameters:
            parameter.grad = None
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _described(value: Any) -> Any:
    """Return a nested value as JSON. Raises TypeError."""
    if isinstance(value, Tensor):
        if type(value) is not Tensor:
            raise TypeError
        kind = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "kind": kind, "cpu": value.device.type == "cpu"}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, list | tuple):
        return {"list": [_described(each) for each in value], "tuple": isinstance(value, tuple)}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _described(each) for key, each in value.items()}}
    raise TypeError


def _zeros(described: Any, device: torch.device) -> Any:
    """Return the value that `_described` described, with zeros in the tensors."""
    if "shape" in described:
        where = torch.device("cpu") if described["cpu"] else device
        return torch.zeros(described["shape"], dtype=getattr(torch, described["kind"]), device=where)
    if "list" in described:
        made = [_zeros(each, device) for each in described["list"]]
        return tuple(made) if described["tuple"] else made
    if "dict" in described:
        return {key: _zeros(each, device) for key, each in described["dict"].items()}
    return described["value"]


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, list | tuple):
        for each in found:
            yield from _tensors(each)
    elif isinstance(found, dict):
        for each in found.values():
            yield from _tensors(each)


def _autocast() -> list[str]:
    """Return device type and type of an autocast context; empty without one."""
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return [kind, str(torch.get_autocast_dtype(kind)).removeprefix("torch.")]
    return []


def _same_autocast(autocast: list[str]) -> AbstractContextManager[Any]:
    if not autocast:
        return nullcontext()
    return torch.autocast(autocast[0], dtype=getattr(torch, autocast[1]))
