"""The parts of a training as a checkpoint holds them, on disk or in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from pollux.ranks.sharded_state import ShardedState
from pollux.ranks.sharding import ShardedModel, ShardedOptimizer
from pollux.training.script_record import COMPILED, PlainNames, plain_name


def fingerprint_of(models: Iterable[torch.nn.Module]) -> str:
    """Return a short text on the models' parameter names and shapes."""
    shapes = [[(plain_name(name), list(p.shape)) for name, p in model.named_parameters()] for model in models]
    size = sum(p.numel() for model in models for p in model.parameters())
    digest = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
    return f"{sum(map(len, shapes))} tensors of {size} parameters ({digest})"


def as_written(part: Any, *, sharded: torch.nn.Module | None) -> Any:
    """Return the part with the state that a checkpoint holds.

    Where the first model is `sharded`, the shards are apart from the rest. Names are those without torch.compile.
    """
    if sharded is not None and isinstance(part, torch.nn.Module):
        return ShardedModel(part)
    if sharded is not None and isinstance(part, torch.optim.Optimizer):
        return ShardedOptimizer(part)
    if isinstance(part, torch.nn.Module) and any(COMPILED in name for name, _ in part.named_modules()):
        return PlainNames(part)
    if sharded is not None:
        return ShardedState(part, sharded.parameters)
    return part


def shards_of(parts: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return this rank's DTensors of all parts `as_written`, by the names that a checkpoint gives them."""
    return {
        f"{name}.{key}": value
        for name, part in parts.items()
        if hasattr(part, "shards")
        for key, value in part.shards().items()
    }
