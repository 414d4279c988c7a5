"""Accelerate scripts with an elastic batch size.

    accelerator = Accelerator(mixed_precision="bf16")
    optimizer = accelerator.prepare(optimizer)
    job = attach(accelerator, model, optimizer, scheduler)          # in the place of prepare(model, loader, scheduler)
    loader = job.loader(dataset, batch_size=64, max_batch_size=4096)
    for epoch in job.epochs(3):
        for batch in loader:
            batch = send_to_device(batch, accelerator.device)
            with job.micro_batch():                                 # in the place of accelerator.accumulate(model)
                job.backward(job.model(**batch).loss)               # in the place of accelerator.backward(loss)
            if job.sync_gradients:
                accelerator.clip_grad_norm_(job.model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()

Accelerate places, casts and compiles the model, and the agent wraps it. Do not pass data loaders and schedulers to
`prepare`: the agent divides the data, and steps the scheduler by the progress of each step. The agent writes the
checkpoints. It refuses FSDP, DeepSpeed and Megatron.

Import this module before Accelerate forms its process group, in `Accelerator()` or `TrainingArguments()`. The agent
can then form the group again when it resizes the job in place.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pollux.errors import PolluxAgentError
from pollux.loop.session import Job
from pollux.loop.session import attach as attach_plainly
from pollux.ranks.rendezvous import alone
from pollux.ranks.sharding import under_fully_shard
from pollux.ranks.world import World, own_group
from pollux.resize.joining import Joiner

try:
    from accelerate import DistributedType, PartialState
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard
    from accelerate.scheduler import AcceleratedScheduler
except ImportError as missing:
    raise PolluxAgentError(
        "accelerate is not installed here: install it, or this package's extra `huggingface`"
    ) from missing

if TYPE_CHECKING:
    from accelerate import Accelerator

_PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def attach(
    accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any | None = None, **options: Any
) -> Job:
    """Attach the agent to a model that `accelerator` has not prepared.

    `optimizer` may be prepared, as in AMP scripts. `options` are those of `pollux.attach`. Raises PolluxAgentError for
    settings of Accelerate that do not work with the agent.
    """
    if accelerator.distributed_type not in _PLAIN:
        raise PolluxAgentError(
            f"the agent does not go with Accelerate's {accelerator.distributed_type.value}"
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise PolluxAgentError(
            "expected Accelerator(gradient_accumulation_steps=1), as the agent accumulates by itself, got "
            f"{accelerator.gradient_accumulation_steps}: multiply the loader's batch_size by it instead"
        )
    if isinstance(scheduler, AcceleratedScheduler):
        raise PolluxAgentError("expected a scheduler that was not passed to accelerator.prepare()")
    job = attach_plainly(
        # As for evaluation, which is all but DistributedDataParallel: the agent wraps after restoring.
        accelerator.prepare_model(model, evaluation_mode=True),
        getattr(optimizer, "optimizer", optimizer),
        scheduler,
        scaler=accelerator.scaler,
        **options | {"ddp_kwargs": ddp_arguments(accelerator, model) | options.get("ddp_kwargs", {})},
    )
    job.training.on_ranks = lambda: follow(job.world, accelerator)
    return job


def follow(world: World, accelerator: Any) -> None:
    """Update Accelerate's ranks and their number, after a resize in place."""
    local = world.places[: world.rank].count(world.places[world.rank])
    for state in (PartialState(), accelerator.state):
        if state.distributed_type is not DistributedType.NO:  # else it knows of this rank alone
            state.num_processes, state.process_index, state.local_process_index = (
                world.size,
                world.rank,
                local,
            )
    if accelerator.distributed_type is DistributedType.NO:
        return
    for loader in accelerator._dataloaders:  # for evaluation
        for name, kind in (("batch_sampler", BatchSamplerShard), ("dataset", IterableDatasetShard)):
            part = getattr(loader, name)
            if isinstance(part, kind):
                part.num_processes, part.process_index = world.size, world.rank
            elif kind is BatchSamplerShard and part is not None:
                # It was prepared for the only rank. torch lets nobody set this attribute in the ordinary way.
                config = accelerator.dataloader_config
                shard = kind(part, world.size, world.rank, even_batches=config.even_batches)
                loader.base_dataloader.__dict__[name] = shard


def ddp_arguments(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, Any]:
    """What the user has set for DistributedDataParallel. Raises PolluxAgentError for a hook, which goes another way."""
    handler = getattr(accelerator, "ddp_handler", None)
    if handler is None or under_fully_shard(model):
        return {}
    if str(getattr(handler.comm_hook, "value", handler.comm_hook)) != "no":
        raise PolluxAgentError(
            "expected DistributedDataParallelKwargs without comm_hook: give it to the agent as "
            'ddp_kwargs={"comm_hook": (state, hook)}'
        )
    arguments: dict[str, Any] = handler.to_kwargs()
    return arguments


def _own_accelerate_s_group() -> None:
    """Let the agent form Accelerate's process group again after a resize.

    Accelerate has no reference to the group: it takes the default one in each call.
    """
    make = PartialState.__init__

    @functools.wraps(make)
    def made(self: Any, *args: Any, **options: Any) -> None:
        if PartialState._shared_state or dist.is_initialized():  # Accelerate makes one in each call
            make(self, *args, **options)
            return
        joiner = Joiner.from_environment()
        with own_group():
            if joiner is not None:  # until it joins, its group has this rank alone
                cpu = options.get("cpu") or args[:1] == (True,) or not torch.cuda.is_available()
                alone(torch.device("cpu" if cpu else "cuda"))
            make(self, *args, **options)
        if joiner is not None:
            self.process_index = (
                joiner.rank
            )  # it is not the main process, though it may be the companion's first
            if self.distributed_type is not DistributedType.NO:
                self.num_processes = joiner.size

    PartialState.__init__ = made


_own_accelerate_s_group()
