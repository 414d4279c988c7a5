"""Checks on a script's models and optimizers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

from pollux.errors import LoopMistake, PolluxAgentError
from pollux.loop.slips import UNUSED, UNUSED_PARAMETERS
from pollux.ranks.plain_values import encode
from pollux.ranks.sharding import is_sharded
from pollux.ranks.torch_internals import uncompiled
from pollux.training.script_state import METHODS, is_stateful
from pollux.training.trained_model import TrainedModel

logger = logging.getLogger("pollux")


def first_trained(model: torch.nn.Module) -> torch.nn.Parameter:
    """The model's first parameter that requires a gradient.

    Raises PolluxAgentError if there is none, or if the model is already wrapped: its wrapper would reduce the gradients
    before the agent could measure them, and the agent's wrapper would reduce them again.
    """
    if not isinstance(model, torch.nn.Module):
        raise PolluxAgentError(
            f"expected a torch.nn.Module as the first argument of attach, got {type(model).__name__}: "
            "attach(model, optimizer)"
        )
    inner = uncompiled(model)
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FullyShardedDataParallel) for part in model.modules()):
        raise PolluxAgentError(
            "expected a model under fully_shard (FSDP2), got one in FullyShardedDataParallel (FSDP1): its flat "
            "parameters cannot be restored at another number of ranks. Use torch.distributed.fsdp.fully_shard"
        )
    if isinstance(inner, DistributedDataParallel | DataParallel):
        raise PolluxAgentError(
            f"expected the plain model, got one in {type(inner).__name__}. The agent wraps the model: leave out your "
            "own wrapper, and give its options as ddp_kwargs={...}"
        )
    lazy = next((name for name, p in model.named_parameters() if torch.nn.parameter.is_lazy(p)), None)
    if lazy is not None:
        raise PolluxAgentError(
            f"expected a model whose parameters have their shapes, got the lazy {lazy}: call model(x) once with a "
            "batch of the right shape, then make the optimizer, then call attach"
        )
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise PolluxAgentError("expected a model to train, found no parameter that requires a gradient")
    return parameter


def check_arguments(optimizers: Sequence[Any], scheduler: Any, scaler: Any, state: Any) -> None:
    """Raise PolluxAgentError for an unusable argument of `attach`. `optimizers`: one, or those of a list.

    Without this check, saving or stepping the argument would fail hours later.
    """
    if not optimizers:
        raise PolluxAgentError("expected an optimizer as the second argument of attach, got an empty list")
    for optimizer in optimizers:
        _check_optimizer(optimizer)
    for name, part in (("scheduler", scheduler), ("scaler", scaler), ("state", state)):
        if name == "state" and isinstance(part, dict):
            encode({k: v for k, v in part.items() if not is_stateful(v)}, lambda _: None)
            continue
        if part is None:
            continue
        missing = [m for m in METHODS if not callable(getattr(part, m, None))]
        if missing:
            hint = ' Give a dict: state={"ema": ema, "best": 0.0}' if name == "state" else ""
            raise PolluxAgentError(
                f"expected {name} to have {' and '.join(missing)}, got {type(part).__name__}: the agent could not save "
                f"it in checkpoints.{hint}"
            )


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PolluxAgentError(
            f"expected a torch.optim.Optimizer as the second argument of attach, got {type(optimizer).__name__}"
        )
    zero = sys.modules.get("torch.distributed.optim")
    if zero is not None and isinstance(optimizer, getattr(zero, "ZeroRedundancyOptimizer", ())):
        raise PolluxAgentError(
            "expected an optimizer whose whole state is on every rank, got a ZeroRedundancyOptimizer, which no "
            "checkpoint can hold as it is. Use the plain optimizer, or shard the model by fully_shard (FSDP2)"
        )
    if all(callable(getattr(optimizer, name, None)) for name in ("first_step", "second_step")):
        raise PolluxAgentError(
            f"expected an optimizer that makes a step by step(), got {type(optimizer).__name__}, which steps by "
            "first_step and second_step: attach its base_optimizer, and call first_step and second_step under "
            "`if job.sync_gradients:`, with per_gpu so large that a step has one pass"
        )
    if not getattr(type(optimizer).step, "hooked", False):
        raise PolluxAgentError(
            f"expected an optimizer that calls torch's Optimizer.__init__, got {type(optimizer).__name__}, whose steps "
            "no hook sees: call super().__init__(optimizer.param_groups, {}) in the class's own __init__"
        )


def look_for_unused(model: TrainedModel, rank: int) -> None:
    """Before one of the first steps: warn once of parameters that no pass has used.

    On several ranks they would fail. Of a model that drops layers at random, some step among the first does. Raises
    LoopMistake where there are other ranks.
    """
    if not model.passed:
        return
    model.unused_looks = model.unused_looks - 1 if model.needs_all_gradients else 0
    if not model.needs_all_gradients:
        return
    own = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    unused = [name for name, p in own.items() if p.grad is None]
    ignored = getattr(model.module, "_ddp_params_and_buffers_to_ignore", ())
    if not set(unused).difference(ignored) or len(unused) == len(own):
        return
    model.unused_looks = 0
    if model.reduces:
        raise LoopMistake(UNUSED)
    if rank == 0:
        logger.warning(UNUSED_PARAMETERS, len(unused), len(own), unused[0])


def check_beside(first: torch.nn.Module, model: torch.nn.Module, name: str) -> None:
    """Raise PolluxAgentError where `model` cannot share the `first` one's job."""
    first_trained(model)
    if is_sharded(model) and not is_sharded(first):
        raise PolluxAgentError(
            f"expected the model under fully_shard in `attach`, and {name!r} only beside it"
        )


def warn_of_unknown_parameters(trained_models: Sequence[TrainedModel]) -> None:
    """Warn about trainable parameters that no known optimizer has."""
    known = {p for t in trained_models for group in t.optimizer.param_groups for p in group["params"]}
    own = {p: n for t in trained_models for n, p in t.module.named_parameters() if p.requires_grad}
    unknown = [name for param, name in own.items() if param not in known]
    if unknown:
        logger.warning(
            "%d of %d parameters that require a gradient (%s first) are in no optimizer that the agent knows: if "
            "another one trains them, its learning rate does not follow the batch size. Give that one to "
            "job.add_model(...)",
            len(unknown),
            len(own),
            unknown[0],
        )
