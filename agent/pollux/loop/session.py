"""`attach`: the agent inside a training script.

job = pollux.attach(model, optimizer, scheduler)
model = job.model
loader = job.loader(dataset, batch_size=128, max_batch_size=4096, per_gpu=(32, 512))
for epoch in job.epochs(90):
    for x, y in loader:
        loss = job.step(lambda: loss_fn(model(x), y), clip=1.0)
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, TypedDict
from weakref import WeakValueDictionary

import torch
from torch.optim import Optimizer

from pollux.checkpoint.training_state import Stateful
from pollux.errors import PolluxAgentError
from pollux.learning_rate.scaling import Rule, rule_for
from pollux.learning_rate.schedule import Schedules
from pollux.loop import slips
from pollux.loop.job import Job
from pollux.loop.notices import notice
from pollux.loop.same_training import origin
from pollux.loop.script_checks import check_arguments, first_trained
from pollux.loop.unlaunched import name_run
from pollux.noise.noise_scale import DECAY
from pollux.optimizers.together import one_of
from pollux.ranks.gathering import as_rank_0
from pollux.ranks.world import join, print_lost_ranks_in_one_line
from pollux.resize.joining import Joiner
from pollux.slurm_job.attempt import Attempt
from pollux.slurm_job.environment import Times
from pollux.slurm_job.trainings import attached, observers
from pollux.training.memory import MemoryBounds
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training
from pollux.tuning import knowledge
from pollux.tuning.measuring_cost import SHARE
from pollux.tuning.mode import mode_for
from pollux.tuning.profile import StepProfile

__all__ = ["Job", "Measuring", "attach"]

_jobs: WeakValueDictionary[int, Job] = WeakValueDictionary()
"""By the id of the optimizer, which lives as long as its job."""


class Measuring(TypedDict, total=False):
    """How the agent measures a training, where the defaults do not fit."""

    measure_share: float
    """Share of the training's time that measuring the noise scale may take; 0.005 by default."""
    every: int
    """Optimizer steps from one measured gradient to the next. By default they follow from the share: 20 or more."""
    decay: float
    """Decay of the noise scale's averages per step of M0 examples."""


def attach(
    model: torch.nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: Any | None = None,
    *,
    scaler: Any | None = None,
    scaling: str | Rule = "auto",
    adaptive: bool | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    name: str | None = None,
    seed: int = 0,
    state: Stateful | dict[str, Any] | None = None,
    measuring: Measuring | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
) -> Job:
    """Join the job's other ranks, restore the newest checkpoint, wrap `model`.

    Train with `job.model` and step with `optimizer`. Where there are several ranks, the agent wraps the model in
    DistributedDataParallel. It leaves a model under `fully_shard` (FSDP2) as it is.

    Args:
        model: as for plain PyTorch, on its device, and not wrapped.
        optimizer: as for plain PyTorch; with `fully_shard`, made after that call. A list of several steps as one:
            [muon, adamw], each of its own parameters.
        scheduler: a learning-rate scheduler; the agent saves, restores and scales it. A list of those of several
            optimizers steps as one.
        scaler: AMP's GradScaler; the agent saves and restores it.
        scaling: the learning-rate rule: "auto", "adascale", "sqrt-adascale", "none", or a function.
        adaptive: whether the batch size may change. None: POLLUX_ADAPTIVE decides (yes or no; a Pollux job's
            directives set it), else yes outside Slurm, and no in a plain Slurm job.
        checkpoint_dir: where checkpoints go. None: POLLUX_CHECKPOINT_DIR.
        name: the training's name among those that this script attaches, such as f"fold-{k}". A restart finds the
            training's checkpoints by it. None: by the calls that lead here and the variables of the loops around them.
        seed: of the order of the data.
        state: the script's own state, saved and restored: a dict of plain values and of objects with `state_dict` and
            `load_state_dict`, or one such object. Plain values are restored in the dict.
        measuring: how the agent measures; see `Measuring`.
        ddp_kwargs: further arguments of DistributedDataParallel; "comm_hook", as (state, function), is a communication
            hook. With such a hook, or with gradient_as_bucket_view, the noise is not measured: the batch size stays.

    Raises:
        LaunchError: the environment variables that describe the ranks contradict each other.
        RankLost: not every rank comes.
        CheckpointError: a checkpoint cannot be used; ForeignCheckpoint: it belongs to another job or model.
        RestartLoop: too many restarts in a row ended without a new checkpoint.
    """
    parameter = first_trained(model)
    listed: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if any((earlier := _jobs.get(id(each))) is not None and earlier.open for each in listed):
        raise PolluxAgentError(slips.ATTACHED)
    scheduler = Schedules(scheduler) if isinstance(scheduler, list | tuple) else scheduler
    check_arguments(listed, scheduler, scaler, state)
    whole = one_of(listed)
    options: Measuring = measuring or {}
    if unknown := set(options) - set(Measuring.__annotations__):
        raise PolluxAgentError(
            f"expected measuring with {', '.join(Measuring.__annotations__)}, got {', '.join(sorted(unknown))}"
        )
    rule = rule_for(scaling)
    times = Times.from_environment()
    # A joiner joins one training, and is a rank like any other in the next.
    joiner = Joiner.from_environment() if attached.first else None
    world = join(parameter.device) if joiner is None else joiner.world(parameter.device)
    times.rendezvous_at = time.time()
    if joiner is None:
        name_run(world)
    agree = partial(as_rank_0, world.control)
    attempt = Attempt.begin(checkpoint_dir, seed=seed, name=name, times=times, agree=agree)
    if attempt.unshared and world.rank == 0:
        notice(
            f"the checkpoints in {attempt.directory} end with this attempt: {attempt.unshared}. So this job refuses to "
            "be moved, and a requeue would begin from the start. Set POLLUX_CHECKPOINT_DIR to a folder that all nodes "
            "share"
        )
    if world.distributed:
        print_lost_ranks_in_one_line(world.rank)
    first = TrainedModel(
        model,
        whole,
        scheduler,
        rule,
        decay=options.get("decay", DECAY),
        measure_every=options.get("every"),
        ddp_kwargs=ddp_kwargs,
    )
    first.record.origin = origin(attempt, model)
    profile = StepProfile(knowledge.gpu_type(world.device, attempt.access))
    share = options.get("measure_share", SHARE)
    if not isinstance(share, Real) or not 0.0 < share <= 1.0:
        raise PolluxAgentError(
            f"expected measure_share as a share of the time, above 0 and up to 1, got {share!r}"
        )
    memory = MemoryBounds(world.device, attempt.directory, profile.gpu_type)
    mode, may_adapt = mode_for(adaptive, attempt.adaptive)
    training = Training(
        world, first, profile, memory, mode=mode, adaptive=may_adapt, scaler=scaler, state=state
    )
    training.timer.cost.share = float(share)
    job = Job(training, attempt, joiner)
    _jobs.update({id(each): job for each in listed})
    for take in observers:
        take(job)
    attempt.times.attached_at = time.time()
    return job
