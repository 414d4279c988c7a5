"""Move a sharded model's shards between ranks.

`fully_shard` cuts a tensor of n rows into k runs of ceil(n / k) rows, one for each of k ranks; the last runs may be
shorter or empty. When the number of ranks changes, all ranks gather one tensor after the other, as a forward pass
gathers parameters, and each keeps its new rows. The optimizer's moments move with their parameters.

Parameters and moments stay the same Python objects, because the script and its optimizer may refer to them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from pollux.errors import RankLost
from pollux.ranks.control import lost_peer
from pollux.ranks.gathering import gather_values
from pollux.ranks.sharded_state import moving
from pollux.ranks.sharding import (
    ShardedOptimizer,
    is_shard,
    local_part,
    under_fully_shard,
    units_of,
)
from pollux.ranks.torch_internals import is_compiled, mesh_of_all_ranks, shard_as
from pollux.ranks.world import World


def sharding_of(model: torch.nn.Module) -> str:
    """Return a short text on how parameters are grouped into units."""
    if not under_fully_shard(model):
        return "none"
    units = [[list(param.shape) for param in unit.params] for unit in units_of(model)]
    return f"{len(units)} units ({hashlib.sha256(json.dumps(units).encode()).hexdigest()[:16]})"


def obstacle_to_resharding(model: torch.nn.Module, optimizer: Optimizer, state: Any = None) -> str | None:
    """Why a model's shards cannot move to other ranks; None where they can. A model that is not sharded has none.

    `state`: the script's own, or None.
    """
    if not under_fully_shard(model):
        return None
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
    try:
        _of_script(state, params)
    except ValueError as error:
        return str(error)
    return None


def _of_script(state: Any, params: list[Tensor]) -> list[tuple[str, Tensor, Tensor]]:
    return [] if state is None else moving(state, params)


def _moves_with(value: object, param: Tensor) -> bool:
    if not isinstance(value, Tensor) or (value.numel() == 1 and not is_shard(value)):
        return True  # a count, equal on all ranks
    if not is_shard(value) or (value.shape, value.dtype) != (param.shape, param.dtype):
        return False
    same: bool = value.placements == param.placements  # type: ignore[attr-defined]
    return same


class MovingShards:
    """Moves the shards of a model and its optimizer to other ranks.

    `send` leaves the training as it is; `install` changes it.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer, state: Any = None) -> None:
        """`state`: the script's own, or None."""
        self._units = units_of(model)
        self._params = ShardedOptimizer(optimizer).params()
        moments = sorted(ShardedOptimizer(optimizer).shards().items())
        self._beside = [(value, self._params[int(key.partition(".")[0])]) for key, value in moments]
        """Moments, then the script's own shards, each with a parameter that is sharded alike."""
        self._beside += [(value, like) for _, value, like in _of_script(state, self._params)]
        tensors = [param for unit in self._units for param in unit.params]
        self._tensors: list[Tensor] = [*tensors, *(value for value, _ in self._beside)]
        self._held = [local_part(tensor).contiguous().reshape(-1) for tensor in self._tensors]
        """This rank's rows of each tensor, flat; they may be followed by padding."""

    @torch.no_grad()
    def send(self, before: int, after: Sequence[int], world: World) -> None:
        """Send the rows of the first `before` ranks to the ranks `after`, in this order.

        Every rank of `world` calls it. Raises RankLost where a rank left, or holds other tensors.
        """
        assert world.control is not None
        kinds = json.dumps([[list(t.shape), str(t.dtype)] for t in self._tensors])
        digest = hashlib.sha256(kinds.encode()).hexdigest()
        try:
            if len(set(gather_values(digest, world.control))) > 1:
                raise RankLost("the ranks' models or optimizers have different shards")
            self._held = [
                self._moved(tensor, held, before, after, world)
                for tensor, held in zip(self._tensors, self._held, strict=True)
            ]
            if world.device.type == "cuda":
                torch.cuda.synchronize(world.device)
            gather_values(None, world.control)  # no rank ends its groups while another one still receives
        except RuntimeError as error:
            if lost_peer(error):
                raise RankLost(f"a rank left while shards moved between ranks: {error}") from error
            raise

    @staticmethod
    def _moved(tensor: Tensor, held: Tensor, before: int, after: Sequence[int], world: World) -> Tensor:
        """Return this rank's new rows of a tensor, with zeros after them up to the length of the longest part."""
        mine = held.new_zeros(_longest(tensor, before))
        if world.rank < before:
            mine[: held.numel()] = held
        gathered = held.new_empty(world.size * mine.numel())
        dist.all_gather_into_tensor(gathered.view(torch.uint8), mine.view(torch.uint8))
        length = _longest(tensor, len(after)) if world.rank in after else 0
        new = held.new_zeros(length)
        if length:
            # The parts of the ranks before follow each other; only the last rows are padding.
            own = gathered[: tensor.numel()][after.index(world.rank) * length :][:length]
            new[: own.numel()] = own
        return new

    def install(self, world: World, name: str) -> None:
        """Install the received rows, sharded over the ranks of `world`.

        `name` is for the mesh, and of no mesh before. Every rank calls it.
        """
        mesh = mesh_of_all_ranks(world.device, world.size, name)
        held = iter(self._held)
        for unit in self._units:
            unit.reshard(mesh, [next(held) for _ in unit.params])
        for (value, param), flat in zip(self._beside, held, strict=True):
            shape = local_part(param).shape
            shard_as(value, flat[: shape.numel()].view(shape), param)


def _longest(tensor: Tensor, ranks: int) -> int:
    """Elements of the longest part of a tensor on so many ranks."""
    rows = len(tensor)
    return -(-rows // ranks) * (tensor.numel() // rows) if rows else 0
