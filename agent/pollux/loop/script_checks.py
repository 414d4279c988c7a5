"""Checks on a script's models and optimizers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pollux.errors import PolluxAgentError
from pollux.ranks.sharding import is_sharded
from pollux.ranks.torch_internals import uncompiled
from pollux.training.trained_model import TrainedModel

logger = logging.getLogger("pollux")


def first_trained(model: torch.nn.Module) -> torch.nn.Parameter:
    """The model's first parameter that requires a gradient.

    Raises PolluxAgentError where there is none, or where the model comes wrapped already: its gradients would be
    reduced before anything could be measured of them, and then once more.
    """
    inner = uncompiled(model)
    if isinstance(inner, DistributedDataParallel | DataParallel):
        raise PolluxAgentError(
            f"expected the model itself, which the agent wraps where ranks are several, got it in a "
            f"{type(inner).__name__}: leave that out, and give its options as ddp_kwargs={{...}}"
        )
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise PolluxAgentError("expected a model to train, found no parameter that requires a gradient")
    return parameter


def check_beside(first: torch.nn.Module, model: torch.nn.Module, name: str) -> None:
    """Raise PolluxAgentError where `model` cannot share the `first` one's job."""
    first_trained(model)
    if is_sharded(model) and not is_sharded(first):
        raise PolluxAgentError(
            f"expected the model under fully_shard in `attach`, and {name!r} only beside it"
        )


def warn_of_unknown_parameters(trained_models: Sequence[TrainedModel]) -> None:
    """Warn of trainable parameters in no optimizer that the agent knows."""
    known = {p for t in trained_models for group in t.optimizer.param_groups for p in group["params"]}
    own = {p for t in trained_models for p in t.module.parameters() if p.requires_grad}
    unknown = own - known
    if unknown:
        logger.warning(
            "%d of %d parameters that require a gradient are in no optimizer that the agent knows: if another one "
            "trains them, its learning rate does not follow the batch size. Give that one to job.add_model(...)",
            len(unknown),
            len(own),
        )
