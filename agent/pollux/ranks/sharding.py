"""Models under FSDP2 (`fully_shard`): synchronisation and shards.

This module imports torch's sharding only if the user's script has imported it, because the import takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux.errors import CheckpointError, PolluxAgentError
from pollux.ranks.torch_internals import FsdpUnit, fsdp_units

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_shard(tensor: object) -> TypeGuard[DTensor]:
    """Tell whether an object is a DTensor; this rank then holds a part of it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor as a view; else the tensor itself."""
    if not is_shard(tensor):
        return tensor
    with torch.no_grad():  # else `to_local` is an operation of its own
        part: Tensor = tensor.to_local()
    return part


def is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether `fully_shard` was applied to the model or a part of it."""
    return any(map(is_shard, model.parameters()))


def under_fully_shard(model: torch.nn.Module) -> bool:
    """Tell the same as `is_sharded`, also while parameters are gathered."""
    return any(True for _ in sharded_modules(model))


def sharded_modules(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules under `fully_shard`; the model may be one of them."""
    module = sys.modules.get("torch.distributed.fsdp")
    if module is not None:
        yield from (part for part in model.modules() if isinstance(part, module.FSDPModule))


def units_of(model: torch.nn.Module) -> list[FsdpUnit]:
    """Return the model's units, each once, in the order of its modules."""
    units = (unit for module in sharded_modules(model) for unit in fsdp_units(module))
    return list({unit.key: unit for unit in units}.values())


def check_sharded(model: torch.nn.Module, world_size: int) -> None:
    """Raise PolluxAgentError where a trained parameter is not synchronised over all ranks."""
    sizes = sorted({len(unit.members) for unit in units_of(model)})
    if sizes != [world_size]:
        found = f"meshes of {sizes} ranks" if sizes else "DTensors, but no module under fully_shard"
        raise PolluxAgentError(
            f"expected fully_shard over all {world_size} ranks, found {found}: the agent scales data parallelism "
            "alone. Leave a loop with tensor or pipeline parallelism as it is, and put `pollux wrap` before its launch "
            "command (Your own loop, in the user guide)"
        )
    plain = [name for name, p in model.named_parameters() if p.requires_grad and not is_shard(p)]
    if plain:
        raise PolluxAgentError(
            f"expected all trained parameters under fully_shard, found {plain[0]!r} and {len(plain) - 1} more outside: "
            "nothing would average their gradients; call fully_shard on the whole model last"
        )


def synchronise(model: torch.nn.Module, reduce: bool) -> None:
    """Set whether backward passes reduce their gradients, as `no_sync` of DDP."""
    model.set_requires_gradient_sync(reduce)  # type: ignore[operator]
    model.set_is_last_backward(reduce)  # type: ignore[operator]


class ShardedModel:
    """A sharded model's state: shards, and buffers whole on every rank."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def shards(self) -> dict[str, Tensor]:
        """Map names to this rank's DTensors; loading into them loads the model."""
        return {name: value for name, value in self.model.state_dict().items() if is_shard(value)}

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the shards."""
        return {name: value for name, value in self.model.state_dict().items() if not is_shard(value)}

    def template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return DTensors to load saved shards into."""
        return self.shards()

    def load_state_dict(self, saved: Mapping[str, Any], shards: Mapping[str, Tensor]) -> None:
        """Load the state without the shards, after the shards. Raises RuntimeError if names do not match."""
        found = self.model.load_state_dict(dict(saved), strict=False)
        missing = set(found.missing_keys) - set(shards)
        if missing or found.unexpected_keys:
            raise RuntimeError(f"missing {sorted(missing)}, unexpected {list(found.unexpected_keys)}")


class ShardedOptimizer:
    """A sharded model's optimizer. Its moments are sharded like the parameters. Names are torch's own numbers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def shards(self) -> dict[str, Tensor]:
        """Map "number.key" to this rank's DTensors."""
        return {
            f"{number}.{key}": value
            for number, values in self.optimizer.state_dict()["state"].items()
            for key, value in values.items()
            if is_shard(value)
        }

    def state_dict(self) -> dict[str, Any]:
        """Return settings, counts of steps, and the names of the shards."""
        state = self.optimizer.state_dict()
        state["shards"] = {name: str(value.dtype) for name, value in self.shards().items()}
        state["state"] = {
            number: {key: value for key, value in values.items() if not is_shard(value)}
            for number, values in state["state"].items()
        }
        return state

    def template(self, saved: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return new DTensors, sharded like the parameters, to load shards into."""
        params = dict(enumerate(self.params()))
        found = {}
        for name, dtype in saved["shards"].items():
            number = int(name.partition(".")[0])
            if number not in params:
                raise CheckpointError(
                    f"the checkpoint's optimizer has a parameter {number}, this script's has {len(params)}"
                )
            kind = getattr(torch, dtype.removeprefix("torch."))
            found[name] = torch.zeros_like(params[number], dtype=kind, requires_grad=False)
        return found

    def load_state_dict(self, saved: Mapping[str, Any], shards: Mapping[str, Tensor]) -> None:
        """Load the whole state, after the shards."""
        state = {number: dict(values) for number, values in saved["state"].items()}
        for name, value in shards.items():
            number, _, key = name.partition(".")
            state.setdefault(int(number), {})[key] = value
        self.optimizer.load_state_dict({"state": state, "param_groups": saved["param_groups"]})

    def params(self) -> list[Tensor]:
        """Return the parameters, in the order of torch's numbers."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]
