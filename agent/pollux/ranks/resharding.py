"""Move a sharded model's shards between ranks.

`fully_shard` cuts a tensor of n rows into k runs of ceil(n / k) rows, one for each of k ranks; the last runs may be
shorter or empty. When the number of ranks changes, each rank sends only the rows that another rank must hold from then
on, so no rank ever holds a whole tensor. The optimizer's moments move with their parameters.

Parameters and moments stay the same Python objects, because the script and its optimizer may refer to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pollux.errors import RankLost
from pollux.ranks.control import lost_peer
from pollux.ranks.gathering import gather_values
from pollux.ranks.sharding import (
    ShardedOptimizer,
    is_shard,
    local_part,
    ranks_per_replica,
    under_fully_shard,
    units_of,
)
from pollux.ranks.torch_internals import is_compiled, mesh_of_all_ranks, shard_as
from pollux.ranks.world import World

BUNDLE = 16 << 20
"""Bytes of one rank's shards that are sent together, where single shards are smaller."""


def sharding_of(model: torch.nn.Module) -> str:
    """Return a short text on how parameters are grouped into units."""
    if not under_fully_shard(model):
        return "none"
    units = [[list(param.shape) for param in unit.params] for unit in units_of(model)]
    return f"{len(units)} units ({hashlib.sha256(json.dumps(units).encode()).hexdigest()[:16]})"


def obstacle_to_resharding(model: torch.nn.Module, optimizer: Optimizer) -> str | None:
    """Why a model's shards cannot move to other ranks; None where they can. A model that is not sharded has none."""
    if not under_fully_shard(model):
        return None
    if ranks_per_replica(model) > 1:
        return "several ranks hold a replica of its model together (tensor parallelism)"
    units = units_of(model)
    why = next((why for unit in units if (why := unit.obstacle()) is not None), None)
    if why is not None:
        return why
    if any(map(is_compiled, model.modules())):
        return "a part of it is compiled, and may hold the present shards"
    own = {id(param) for unit in units for param in unit.params}
    params = ShardedOptimizer(optimizer).params()
    if any(is_shard(param) and id(param) not in own for param in params):
        return "its optimizer has shards of another model"
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if is_shard(param) and not _moves_with(value, param):
                return f"its optimizer's {key!r} is not sharded as the parameter is"
    return None


def _moves_with(value: object, param: Tensor) -> bool:
    if not isinstance(value, Tensor) or (value.numel() == 1 and not is_shard(value)):
        return True  # a count, equal on all ranks
    if not is_shard(value) or (value.shape, value.dtype) != (param.shape, param.dtype):
        return False
    same: bool = value.placements == param.placements  # type: ignore[attr-defined]
    return same


class _Rows(NamedTuple):
    """A run of a tensor's rows."""

    start: int
    stop: int

    @classmethod
    def of(cls, length: int, parts: int, part: int) -> _Rows:
        """The rows of one of `parts` ranks."""
        each = -(-length // parts)
        return cls(min(each * part, length), min(each * (part + 1), length))


class _Shared(NamedTuple):
    """A rank's part before and another rank's after, each as (parts, part)."""

    before: tuple[int, int]
    after: tuple[int, int]

    def rows(self, length: int) -> _Rows:
        old, new = _Rows.of(length, *self.before), _Rows.of(length, *self.after)
        start = max(old.start, new.start)
        return _Rows(start, max(start, min(old.stop, new.stop)))


def _shared(before: Sequence[int], source: int, after: Sequence[int], target: int) -> _Shared | None:
    if source not in before or target not in after:
        return None
    return _Shared((len(before), before.index(source)), (len(after), after.index(target)))


class MovingShards:
    """Moves the shards of a model and its optimizer to other ranks.

    `send` leaves the training as it is; `install` changes it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self._units = units_of(model)
        self._params = ShardedOptimizer(optimizer).params()
        self._moments = sorted(ShardedOptimizer(optimizer).shards().items())
        tensors = [param for unit in self._units for param in unit.params]
        self._tensors: list[Tensor] = [*tensors, *(value for _, value in self._moments)]
        self._held = [local_part(tensor).contiguous().reshape(-1) for tensor in self._tensors]
        """This rank's rows of each tensor, flat; they may be followed by padding."""

    @torch.no_grad()
    def send(self, before: Sequence[int], after: Sequence[int], world: World) -> None:
        """Send the rows of ranks `before` to ranks `after`.

        Each of the two lists the ranks of `world` that hold the rows, in their order. Every rank of `world` calls it.
        Raises RankLost where a rank left, or holds other tensors.
        """
        assert world.control is not None
        kinds = json.dumps([[list(t.shape), str(t.dtype)] for t in self._tensors])
        digest = hashlib.sha256(kinds.encode()).hexdigest()
        try:
            if len(set(gather_values(digest, world.control))) > 1:
                raise RankLost("the ranks' models or optimizers have different shards")
            arrived = {
                i: rows
                for bundle in self._bundles(world.size)
                for i, rows in self._sent(bundle, before, after, world)
            }
        except RuntimeError as error:
            if lost_peer(error):
                raise RankLost(f"a rank left while shards moved between ranks: {error}") from error
            raise
        if world.device.type == "cuda":
            torch.cuda.synchronize(world.device)  # a rank that leaves ends its process
        self._held = [arrived[index] for index in range(len(self._tensors))]

    def _bundles(self, ranks: int) -> Iterator[list[int]]:
        """Indices of tensors of one dtype to be sent together; equal on all ranks."""
        bundle: list[int] = []
        size = 0
        order = sorted(range(len(self._tensors)), key=lambda index: str(self._tensors[index].dtype))
        for index in order:
            tensor = self._tensors[index]
            new = bundle and self._tensors[bundle[0]].dtype != tensor.dtype
            if bundle and (new or size >= BUNDLE * ranks):
                yield bundle
                bundle, size = [], 0
            bundle.append(index)
            size += tensor.numel() * tensor.element_size()
        if bundle:
            yield bundle

    def _sent(
        self, bundle: list[int], before: Sequence[int], after: Sequence[int], world: World
    ) -> Iterator[tuple[int, Tensor]]:
        """Send a bundle; return this rank's new rows of each tensor, by index."""
        me, dtype = world.rank, self._tensors[bundle[0]].dtype
        new = {index: self._room(index, after, world) for index in bundle}
        pieces: list[Tensor] = []
        places: list[Tensor] = []
        given, taken = [0] * world.size, [0] * world.size
        for peer in range(world.size):
            for index in bundle:
                goes = self._cut(self._held[index], index, before, me, _shared(before, me, after, peer))
                comes = self._cut(new[index], index, after, me, _shared(before, peer, after, me))
                if peer == me:
                    comes.copy_(goes)
                    continue
                pieces.append(goes)
                places.append(comes)
                given[peer] += goes.numel() * dtype.itemsize
                taken[peer] += comes.numel() * dtype.itemsize
        sent = torch.cat(pieces)
        received = torch.empty(sum(map(Tensor.numel, places)), dtype=dtype, device=world.device)
        dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), taken, given)
        for place, piece in zip(
            places, torch.split(received, [place.numel() for place in places]), strict=True
        ):
            place.copy_(piece)
        yield from new.items()

    def _room(self, index: int, after: Sequence[int], world: World) -> Tensor:
        """Return zeros for the longest part of a tensor. It is empty on a rank that leaves."""
        tensor = self._tensors[index]
        rows = _Rows.of(len(tensor), len(after), 0).stop if world.rank in after else 0
        return torch.zeros(rows * _width(tensor), dtype=tensor.dtype, device=world.device)

    def _cut(
        self, flat: Tensor, index: int, ranks: Sequence[int], rank: int, shared: _Shared | None
    ) -> Tensor:
        """Return the shared rows out of `flat`, which has those of `rank`."""
        if shared is None:
            return flat[:0]
        tensor = self._tensors[index]
        rows = shared.rows(len(tensor))
        first = _Rows.of(len(tensor), len(ranks), ranks.index(rank)).start
        width = _width(tensor)
        return flat[(rows.start - first) * width : (rows.stop - first) * width]

    def install(self, world: World, name: str) -> None:
        """Install the received rows, sharded over the ranks of `world`.

        `name` is for the mesh, and of no mesh before. Every rank calls it.
        """
        mesh = mesh_of_all_ranks(world.device, world.size, name)
        held = iter(self._held)
        for unit in self._units:
            unit.reshard(mesh, [next(held) for _ in unit.params])
        for (key, moment), flat in zip(self._moments, held, strict=True):
            param = self._params[int(key.partition(".")[0])]
            shape = local_part(param).shape
            shard_as(moment, flat[: shape.numel()].view(shape), param)


def _width(tensor: Tensor) -> int:
    return tensor.numel() // len(tensor) if len(tensor) else 0
