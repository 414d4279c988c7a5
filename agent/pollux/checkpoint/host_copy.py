"""Copies of a training's state on the host, which a thread writes while the training goes on.

A step waits only for one copy in memory, and not for the disk. From a GPU, the copy is a transfer into pinned memory,
and the thread waits for it. The buffers cost host memory of the state's size. `prepare` makes them before the first
save, because fresh memory is an order of magnitude slower to write than memory in use.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pollux.ranks.sharding import is_shard, local_part

Path = tuple[Any, ...]


class HostCopy:
    """Copies of nested states in buffers on the host, which are used again from save to save.

    Of a DTensor, the buffer holds this rank's part.
    """

    def __init__(self) -> None:
        self._buffers: dict[Path, torch.Tensor] = {}
        self._copied: dict[tuple[Any, ...], torch.Tensor] = {}
        self._events: list[torch.cuda.Event] = []

    @property
    def held(self) -> bool:
        """Whether there are buffers."""
        return bool(self._buffers)

    def prepare(self, state: Any) -> None:
        """Make the buffers that `state` will need and touch their memory."""
        self._walk(state, (), self._make)

    def take(self, state: Any) -> Any:
        """Return a copy of `state` that further training does not change, valid until the next call.

        Copies from a GPU may still be under way: call `await_transfers` before reading.
        """
        self._copied.clear()
        copied = self._walk(state, (), self._copy)
        if any(device == "cuda" for device, *_ in self._copied):
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._events = [event]
        return copied

    def release(self) -> None:
        """Give the buffers back: what `take` returned is not needed any more."""
        self._buffers.clear()
        self._copied.clear()

    def await_transfers(self) -> None:
        """Wait until the copies of the last `take` have arrived. Any thread may call it."""
        for event in self._events:
            event.synchronize()
        self._events = []

    def _walk(self, value: Any, path: Path, leaf: Callable[[torch.Tensor, Path], torch.Tensor]) -> Any:
        match value:
            case torch.Tensor():
                return leaf(value, path)
            case Mapping():
                pairs = {key: self._walk(item, (*path, key), leaf) for key, item in value.items()}
                return pairs if type(value) is dict else _like(value, pairs)
            case list():
                return [self._walk(item, (*path, index), leaf) for index, item in enumerate(value)]
            case tuple():
                items = [self._walk(item, (*path, index), leaf) for index, item in enumerate(value)]
                return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
            case None | bool() | int() | float() | complex() | str() | bytes():
                return value
            case _:
                return copy.deepcopy(value)

    def _make(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        if is_shard(tensor):
            self._shard(tensor, path)
        elif _plain(tensor):
            self._buffer(tensor, path, touch=True)
        return tensor

    def _buffer(self, tensor: torch.Tensor, path: Path, *, touch: bool = False) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
            if touch:
                buffer.zero_()
            self._buffers[path] = buffer
        return buffer

    def _copy(self, tensor: torch.Tensor, path: Path) -> torch.Tensor:
        if is_shard(tensor):
            return self._shard(tensor, path)
        if not _plain(tensor):
            return tensor.detach().clone()
        # Tied weights stay tied in the copy, and are copied once.
        key = (tensor.device.type, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        found = self._copied.get(key) if tensor.numel() else None
        if found is not None:
            return found
        buffer = self._buffer(tensor, path)
        buffer.copy_(tensor.detach(), non_blocking=True)
        self._copied[key] = buffer
        return buffer

    def _shard(self, shard: Any, path: Path) -> torch.Tensor:
        buffer = self._buffers.get(path)
        if buffer is None or _layout(buffer) != _layout(shard):
            buffer = shard.detach().cpu() if shard.is_cuda else shard.detach().clone()
            self._buffers[path] = buffer
        else:
            local_part(buffer).copy_(local_part(shard))
        return buffer


def _layout(shard: Any) -> tuple[Any, ...]:
    """What two DTensors must share for one to be copied into the other."""
    return shard.shape, shard.dtype, shard.placements, shard.device_mesh, local_part(shard).shape


def _plain(tensor: torch.Tensor) -> bool:
    """Whether `copy_` into a buffer keeps all: dense, of torch's class."""
    own = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return (
        own
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and tensor.device.type in ("cpu", "cuda")
    )


def _like(value: Mapping[Any, Any], pairs: dict[Any, Any]) -> Any:
    """Return a mapping of the same class (an OrderedDict, say), or a dict if the class does not allow that."""
    try:
        made = copy.copy(value)
        for key, item in pairs.items():
            made[key] = item  # type: ignore[index]
    except TypeError:
        return pairs
    return made


def size_of(state: Any) -> int:
    """Bytes of the tensors in a nested state, of a DTensor this rank's part."""
    match state:
        case torch.Tensor():
            return (local_part(state) if is_shard(state) else state).nbytes
        case Mapping():
            return sum(map(size_of, state.values()))
        case list() | tuple():
            return sum(map(size_of, state))
        case _:
            return 0
