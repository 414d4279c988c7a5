"""The script's own state under fully_shard: its DTensors are saved and moved as the model's are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pollux.errors import CheckpointError
from pollux.ranks.sharding import is_shard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

SHARD = "pollux.shard"
"""The key of what stands in a checkpoint's state in place of a tensor that is among its shards."""


def marker(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return what stands in place of a tensor that is saved under `name`."""
    return {SHARD: name, "size": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}


class ShardedState:
    """A part of the script's, with its DTensors apart. Their names are their places in its state."""

    def __init__(self, part: Any, params: Callable[[], Iterator[Tensor]]) -> None:
        """`params`: the model's, whose sharding a tensor takes that the script has not made yet."""
        self._part, self._params = part, params

    def shards(self) -> dict[str, Tensor]:
        """Map places to this rank's DTensors."""
        return dict(_shards(self._part.state_dict(), ()))

    def state_dict(self) -> Any:
        """Return the state with a marker for each DTensor."""
        return _replaced(
            self._part.state_dict(),
            lambda value, path: marker(_name(path), value) if is_shard(value) else value,
        )

    def template(self, saved: Any) -> dict[str, Tensor]:
        """Return new DTensors to load the saved ones into. Raises CheckpointError for one that has no place here."""
        present, found = self.shards(), {}
        for name, size, kind in _marked(saved):
            like = present.get(name)
            if like is None:
                like = next((p for p in self._params() if is_shard(p) and list(p.shape) == size), None)
            if like is None or list(like.shape) != size:
                raise CheckpointError(
                    f"the checkpoint's state has a sharded tensor {name} of shape {size}, the script's has none"
                )
            found[name] = torch.zeros_like(like.detach(), dtype=getattr(torch, kind))
        return found

    def load_state_dict(self, saved: Any, shards: Mapping[str, Tensor]) -> None:
        """Load the whole state, after the shards."""

        def back(value: Any, _: Any) -> Any:
            return shards[value[SHARD]] if isinstance(value, Mapping) and SHARD in value else value

        self._part.load_state_dict(_replaced(saved, back))


def moving(part: Any, params: list[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    """Return the DTensors of a part with a parameter of the same shape, sharded alike, for each.

    Raises ValueError, which says why they cannot move to other ranks in place.
    """
    first, again = (dict(_shards(part.state_dict(), ())) for _ in range(2))
    found: list[tuple[str, Tensor, Tensor]] = []
    for name, value in sorted(first.items()):
        if again.get(name) is not value:
            raise ValueError(f"its state {name} gives copies of its shards")
        alike = (
            p for p in params if is_shard(p) and p.shape == value.shape and p.placements == value.placements
        )
        like = next(alike, None)
        if like is None:
            raise ValueError(f"its state {name} is not sharded as a parameter is")
        found.append((name, value, like))
    return found


def _name(path: tuple[Any, ...]) -> str:
    return json.dumps(path, default=str)


def _shards(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[str, DTensor]]:
    if is_shard(value):
        yield _name(path), value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _shards(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _shards(item, (*path, number))


def _marked(value: Any) -> Iterator[tuple[str, list[int], str]]:
    if isinstance(value, Mapping):
        if SHARD in value:
            yield value[SHARD], list(value["size"]), value["dtype"]
            return
        for item in value.values():
            yield from _marked(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _marked(item)


def _replaced(value: Any, of: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dicts and lists with `of` in place of each leaf and marker."""
    new = of(value, path)
    if new is not value or isinstance(value, Tensor):
        return new
    if isinstance(value, Mapping):
        made = {key: _replaced(item, of, (*path, key)) for key, item in value.items()}
        if all(made[key] is item for key, item in value.items()):
            return value
        return made
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, of, (*path, number)) for number, item in enumerate(value))
    return value
