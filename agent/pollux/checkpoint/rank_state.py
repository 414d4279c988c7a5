"""Find the script's state that differs between ranks, and keep each rank's.

Rank 0's state is written for all ranks. That is right where it is equal on all ranks, so they compare digests before
each write: of what the script gave as `state=`, of its scheduler and scaler, and of its optimizers. What differs is
saved for each rank, and restored on as many ranks. On another number of ranks it is refused by its name, except for
numbers with a fraction (a metric that each rank measured): rank 0's then counts.

Two kinds of state differ and are rank 0's all the same: what rank 0 alone has changed (as a best score under
`if job.is_main:`), and copies of the model's buffers, which DistributedDataParallel takes from rank 0, too.
"""

from __future__ import annotations

import copy
import json
import logging
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from pollux.errors import CheckpointError, StateError
from pollux.ranks.control import ControlExchange
from pollux.ranks.plain_values import dumps
from pollux.ranks.sharded_state import SHARD, marker
from pollux.ranks.sharding import is_shard
from pollux.training.script_state import ScriptSnapshot
from pollux.training.training import Training

logger = logging.getLogger("pollux")

LARGEST = 1 << 26
"""Bytes of one rank's own state that all ranks get, where rank 0 writes the checkpoint."""
_MISSING: Final = object()
_SCRIPT = ("user", "scheduler", "scaler")
_PIECE = 1 << 20

Path = tuple[Any, ...]
Digests = Any
"""Of a container a dict of its items' digests, else one integer."""


class RankState:
    """What of a training's state differs between ranks. Every rank calls each method alike, unless told."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._initial: dict[str, Digests] = {}
        """Of the script's state as this rank began with it."""
        self._joined = False
        self._compared = False
        """Optimizers were compared in this attempt: with equal gradients they stay equal."""
        self._own: list[Path] = []
        """What differed at the newest comparison."""
        self._warned: set[Path] = set()

    def begin(self) -> None:
        """Note the script's state at the beginning of the loop."""
        if self._training.world.distributed and not self._initial:
            self._initial = self._digests(snapshots(self._training.parts()))

    def join(self, state: Mapping[str, Any]) -> None:
        """On a joiner: note the state that rank 0 gave."""
        self._initial, self._joined = self._digests(state), True

    def divide(
        self, exchange: ControlExchange, parts: Mapping[str, Any], *, sharded: bool
    ) -> tuple[dict[str, Any], list[dict[Path, Any]], dict[str, Tensor]]:
        """Return the parts to write, what each rank has apart, and this rank's tensors of it.

        The parts of the script give their state once. Under `sharded` each rank writes its tensors, else they are among
        what each rank has. Raises StateError on every rank where that is too much for one file.
        """
        parts = snapshots(parts)
        own = self._differing(exchange, parts)
        if not own:
            return parts, [], {}
        tensors: dict[str, Tensor] = {}
        mine: dict[Path, Any] = {}
        for path in own:
            value = _at(parts[path[0]].state_dict(), path[1:])
            if value is _MISSING:
                continue
            mine[path] = _apart(value, path, exchange.rank, tensors) if sharded else _on_host(value)
        size = 0 if sharded else len(dumps(list(mine.items())))
        sizes = exchange.gather(size)
        if max(sizes) > LARGEST:
            raise StateError(
                f"{_names(own)} differs between ranks, and rank {sizes.index(max(sizes))}'s has {max(sizes) / 1e6:.0f} "
                "MB, too much for one checkpoint: keep it in files of each rank's own, and leave it out of state="
            )
        return parts, exchange.gather(mine), tensors

    def _differing(self, exchange: ControlExchange, parts: Mapping[str, Any]) -> list[Path]:
        """Return the places of what differs between ranks and is not rank 0's alone."""
        if exchange.group is None:
            if exchange.size < self._training.world.size and self._own:
                raise StateError(
                    f"{_names(self._own)} differs between ranks, and rank 0 cannot save it alone"
                )
            return []
        mine = self._digests(parts)
        kind = self._training.profile.gpu_type
        answers = exchange.gather((zlib.crc32(repr(mine).encode()), kind))
        self._compared = True
        self._own = []
        if len({digest for digest, _ in answers}) > 1:
            every = exchange.gather((mine, self._initial, self._joined))
            exactly = len({kind for _, kind in answers}) == 1
            self._own = [
                path for path in _unlike([found for found, _, _ in every]) if not _of_first(path, every)
            ]
            if not exactly:
                # Devices of different types round differently; their parameters differ as much.
                self._own = [path for path in self._own if not self._rounded(parts, path)]
        self._tell(parts, exchange.rank)
        return self._own

    def _tell(self, parts: Mapping[str, Any], rank: int) -> None:
        tied = [path for path in self._own if not _measured(_at(parts[path[0]].state_dict(), path[1:]))]
        self._training.tied = f"{_names(tied)} differs between its ranks" if tied else ""
        new = [path for path in self._own if path not in self._warned]
        self._warned.update(new)
        if new and rank == 0:
            here = (
                f", on {self._training.world.size} ranks alone, so polluxd does not move this job"
                if tied
                else ""
            )
            logger.warning(
                "%s differs between ranks: each rank's is saved and restored%s. If it should be equal, give all ranks "
                "the same%s",
                _names(new),
                here,
                ". If each rank can make its own, leave it out of state=" if new[0][0] == "user" else "",
            )

    def _rounded(self, parts: Mapping[str, Any], path: Path) -> bool:
        value = _at(parts[path[0]].state_dict(), path[1:])
        return isinstance(value, Tensor) and value.is_floating_point()

    def _digests(self, parts: Mapping[str, Any]) -> dict[str, Digests]:
        """Return digests of the script's state. Waits for the device once."""
        compared = {name: part for name, part in parts.items() if self._compares(name)}
        # A library's own records (its log, its clocks) differ, and rank 0's are the training's.
        wanted = {name: part for name, part in compared.items() if not getattr(part, "of_rank_0", False)}
        states = {
            name: part.state_dict() if hasattr(part, "state_dict") else part for name, part in wanted.items()
        }
        buffers = {
            (name, buffer.shape)
            for model in self._training.models
            for name, buffer in model.module.named_buffers()
        }
        sums = iter(sums_by_place(list(_tensors(states, buffers))))
        return {name: _digest(state, (name,), sums, buffers) for name, state in states.items()}

    def _compares(self, name: str) -> bool:
        kind = name.rpartition(".")[2]
        if kind != "optimizer":
            return kind in _SCRIPT
        # A sharded optimizer's plain tensors are few, or of its own shards.
        sharded = any(map(is_shard, self._training.models[0].module.parameters()))
        return sharded or not self._compared or any(path[0] == name for path in self._own)

    def restored(self, name: str, part: Any, state: Any, own: Sequence[Mapping[Path, Any]], fill: Any) -> Any:
        """Return a part's saved state with what this rank had apart.

        `fill` loads tensors by their names. Raises CheckpointError where another number of ranks wrote it.
        """
        paths = sorted({path for each in own for path in each if path[0] == name}, key=repr)
        if not paths:
            return state
        world = self._training.world
        if len(own) != world.size:
            named = getattr(part, "names", None)
            kept = [path for path in paths if named is None or path[1] in named]
            tied = [path for path in kept if not all(_measured(each.get(path, _MISSING)) for each in own)]
            if tied:
                raise CheckpointError(
                    f"the checkpoint has {_names(tied)} of each of {len(own)} ranks, which differ, and these are "
                    f"{world.size}: start on {len(own)} ranks, or leave it out of state="
                )
            if world.rank == 0:
                logger.warning("%s differed between %d ranks: rank 0's counts", _names(paths), len(own))
            return state
        mine = {path: value for path, value in own[world.rank].items() if path[0] == name}
        shards = {key: value for tree in mine.values() for key, value in _blank(tree)}
        fill(shards)
        for path, value in mine.items():
            state = _put(state, path[1:], _whole(value, shards))
        return state


def snapshots(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts with the script's as they are now: each gives its state once, on every rank."""
    return {
        name: ScriptSnapshot(part) if name.rpartition(".")[2] in _SCRIPT else part
        for name, part in parts.items()
    }


# -- digests ----------------------------------------------------------------------------------------------------------


def sums_by_place(tensors: Sequence[Tensor]) -> list[int]:
    """Return a sum over the bits of each tensor, by place. Waits for the device once."""
    sums = [_sum_by_place(tensor) for tensor in tensors]
    if not sums:
        return []
    found: list[int] = torch.stack([each.to(sums[0].device) for each in sums]).tolist()
    return found


def _sum_by_place(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce().values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_quantized:
        tensor = tensor.int_repr()
    whole = tensor.contiguous().reshape(-1)
    flat = whole.view(torch.int32 if whole.element_size() % 4 == 0 else torch.uint8)
    places = 2 * torch.arange(1, min(flat.numel(), _PIECE) + 1, dtype=torch.int64, device=flat.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, piece in enumerate(torch.split(flat, _PIECE)):
        total += (piece.to(torch.int64) * places[: piece.numel()]).sum() * (2 * number + 1)
    return total


def _items(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """Return a container's items by their names; None for a leaf."""
    if isinstance(value, Mapping):
        return None if SHARD in value else value.items()
    if isinstance(value, list | tuple) and any(
        isinstance(v, Tensor | np.ndarray | Mapping | list) for v in value
    ):
        return enumerate(value)
    return None


def _is_buffer(path: Path, value: Tensor, buffers: set[tuple[str, torch.Size]]) -> bool:
    """Whether a tensor is a copy of one of the model's buffers, by its name and shape."""
    text = ".".join(map(str, path))
    return any(shape == value.shape and text.endswith(f".{name}") for name, shape in buffers)


def _tensors(value: Any, buffers: set[tuple[str, torch.Size]], path: Path = ()) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not is_shard(value) and not _is_buffer(path, value, buffers):
            yield value
        return
    for key, item in _items(value) or ():
        yield from _tensors(item, buffers, (*path, key))


def _digest(value: Any, path: Path, sums: Iterator[int], buffers: set[tuple[str, torch.Size]]) -> Digests:
    if isinstance(value, Tensor):
        if is_shard(value) or _is_buffer(path, value, buffers):
            return 0
        return zlib.crc32(f"{tuple(value.shape)} {value.dtype} {next(sums)}".encode())
    items = _items(value)
    if items is not None:
        return {key: _digest(item, (*path, key), sums, buffers) for key, item in items}
    if isinstance(value, Mapping):
        return 0  # a shard's place
    if isinstance(value, np.ndarray):
        return zlib.crc32(f"{value.shape} {value.dtype}".encode() + np.ascontiguousarray(value).tobytes())
    return zlib.crc32(repr(sorted(value, key=repr) if isinstance(value, set | frozenset) else value).encode())


def _unlike(found: Sequence[Digests], path: Path = ()) -> Iterator[Path]:
    """Yield the places where digests differ: the deepest at which all ranks have the same names."""
    first = found[0]
    if all(each == first for each in found):
        return
    if path and not all(isinstance(each, dict) and each.keys() == first.keys() for each in found):
        yield path
        return
    for key in first:
        yield from _unlike([each[key] for each in found], (*path, key))


def _of_first(path: Path, every: Sequence[tuple[Digests, Digests, bool]]) -> bool:
    """Whether rank 0 alone has changed this: the others have what they began with, which was rank 0's."""
    origin = _at(every[0][1], path)
    return all(
        _at(now, path) == _at(initial, path) and (joined or _at(initial, path) == origin)
        for now, initial, joined in every[1:]
    )


# -- trees of state ---------------------------------------------------------------------------------------------------


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        try:
            tree = tree[key]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return tree


def _put(tree: Any, path: Path, value: Any) -> Any:
    """Return a copy of `tree` with another value at a place."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(tree, tuple):
        changed = list(tree)
        changed[key] = _put(tree[key], rest, value)
        return tuple(changed)
    made = copy.copy(tree)
    made[key] = _put(tree[key] if rest else None, rest, value)
    return made


def _apart(value: Any, path: Path, rank: int, tensors: dict[str, Tensor]) -> Any:
    """Return `value` with a marker in place of each tensor, which goes to `tensors`."""
    if isinstance(value, Tensor):
        name = f"rank {rank}: {json.dumps(path, default=str)}"
        tensors[name] = value
        return marker(name, value)
    items = _items(value)
    if items is None:
        return value
    parts = {key: _apart(item, (*path, key), rank, tensors) for key, item in items}
    return parts if isinstance(value, Mapping) else type(value)(parts.values())


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    items = _items(value)
    if items is None:
        return value
    parts = {key: _on_host(item) for key, item in items}
    return parts if isinstance(value, Mapping) else type(value)(parts.values())


def _blank(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield memory for each marked tensor, by its name."""
    if isinstance(tree, Mapping) and SHARD in tree:
        yield tree[SHARD], torch.empty(tree["size"], dtype=getattr(torch, tree["dtype"]))
        return
    for _, item in _items(tree) or ():
        yield from _blank(item)


def _whole(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, Mapping) and SHARD in tree:
        return tensors[tree[SHARD]]
    items = _items(tree)
    if items is None:
        return tree
    parts = {key: _whole(item, tensors) for key, item in items}
    return parts if isinstance(tree, Mapping) else type(tree)(parts.values())


def _measured(value: Any) -> bool:
    """Whether a value is a number with a fraction, or a list of them: a metric."""
    if isinstance(value, list) and value:
        return all(map(_measured, value))
    return value is _MISSING or isinstance(value, float | np.floating)


def _names(paths: Sequence[Path]) -> str:
    """Return the first place in the script's words, and how many more."""
    (part, *keys), more = paths[0], len(paths) - 1
    owner, _, kind = part.rpartition(".")
    label = {"user": "state", "optimizer": "the optimizer's state"}.get(kind, f"the {kind}'s state")
    label = f"{label} of {owner!r}" if owner else label
    keys = keys[1:] if kind == "optimizer" and keys[:1] == ["state"] else keys
    return label + "".join(f"[{key!r}]" for key in keys) + (f" (and {more} more)" if more else "")
