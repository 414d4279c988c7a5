"""`attach` and the `Job` that it returns: the agent inside a training script.

job = pollux.attach(model, optimizer, scheduler)
loader = job.loader(dataset, batch_size=128, max_batch_size=4096, per_gpu=(32, 512))
for epoch in job.epochs(90):
    for x, y in loader:
        with job.micro_batch():
            job.backward(loss_fn(job.model(x), y))
        if job.sync_gradients:
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pollux.checkpoint.restart import Restart
from pollux.checkpoint.training_state import Stateful
from pollux.data.loader import elastic_loader
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice, BatchLimits
from pollux.learning_rate.progress import Progress
from pollux.learning_rate.scaling import Rule, follow, rule_for
from pollux.loop.added_model import AddedModel
from pollux.loop.batches import MicroBatch, TrainingLoader, weigh
from pollux.loop.memory import MemoryBounds
from pollux.loop.readings import Readings
from pollux.loop.report import report_of
from pollux.loop.script_checks import check_beside, first_trained, tell_of_strangers
from pollux.loop.stepper import Stepper
from pollux.loop.trained_model import TrainedModel
from pollux.noise.estimators import CommunicationHook
from pollux.noise.measuring import NoiseMeter
from pollux.noise.noise_scale import DECAY
from pollux.ranks.control import ControlExchange, Decision
from pollux.ranks.world import World, join
from pollux.resize.joining import Joiner
from pollux.resize.resizer import Resizer
from pollux.slurm_job.environment import Times
from pollux.tuning import knowledge
from pollux.tuning.batch_choice import Advisor, batch_limits, choose_on_arrival, initial_choice, within_pass
from pollux.tuning.knowledge import introduction
from pollux.tuning.mode import Mode, mode_for
from pollux.tuning.pass_timer import PassTimer, clock_of
from pollux.tuning.profile import StepProfile
from pollux.tuning.throughput import ThroughputModel


def attach(
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: Any | None = None,
    *,
    scaler: Any | None = None,
    scaling: str | Rule = "auto",
    adaptive: bool | None = None,
    mode: str | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    state: Stateful | None = None,
    noise_decay: float = DECAY,
    measure_every: int | None = None,
    ddp_kwargs: Mapping[str, Any] | None = None,
    comm_hook: CommunicationHook | None = None,
    throughput: ThroughputModel | None = None,
) -> Job:
    """Join the job's other ranks, restore the newest checkpoint, wrap `model`.

    Train with `job.model` and step with `optimizer`. Where there are several ranks, the agent wraps the model in
    DistributedDataParallel. It leaves a model under `fully_shard` (FSDP2, over all ranks) as it is.

    Args:
        model: as for plain PyTorch, on its device, and not wrapped.
        optimizer: as for plain PyTorch; with `fully_shard`, made after that call.
        scheduler: a learning-rate scheduler; the agent saves, restores and scales it.
        scaler: AMP's GradScaler; the agent saves and restores it.
        scaling: the learning-rate rule: "auto", "adascale", "sqrt", "linear", "legw:STEPS", "none", or a function.
        adaptive: whether the batch size may change. None: POLLUX_ADAPTIVE decides (yes or no; a Pollux job's
            directives set it), else yes outside Slurm, and in a plain Slurm job yes only where `mode` is given.
        mode: "observe" (measure and report), "advise" (also say what the agent would choose) or "enforce". None:
            POLLUX_MODE, else "enforce".
        checkpoint_dir: where checkpoints go. None: POLLUX_CHECKPOINT_DIR.
        seed: of the order of the data.
        state: the script's own state, with `state_dict` and `load_state_dict`; saved and restored.
        noise_decay: decay of the noise scale's averages per step of M0 examples.
        measure_every: optimizer steps from one measured gradient to the next. None: 1 to 20, by cost.
        ddp_kwargs: further arguments of DistributedDataParallel.
        comm_hook: a communication hook for DistributedDataParallel, as (state, function). The agent's hook, which
            measures the noise, calls it.
        throughput: an equation of step times that replaces the agent's (`pollux.tuning.throughput`).

    Raises:
        LaunchError: the environment variables that describe the ranks contradict each other.
        RankLost: not every rank comes.
        CheckpointError: a checkpoint cannot be used; ForeignCheckpoint: it belongs to another job or model.
        RestartLoop: too many restarts in a row ended without a new checkpoint.
    """
    parameter = first_trained(model)
    rule = rule_for(scaling)
    times = Times.from_environment()
    joiner = Joiner.from_environment()
    world = join(parameter.device) if joiner is None else joiner.world(parameter.device)
    times.rendezvous_at = time.time()
    restart = Restart(world, checkpoint_dir, seed=seed, times=times)
    job = Job(
        model,
        optimizer,
        scheduler,
        scaler,
        world,
        restart,
        rule=rule,
        mode=mode_for(mode, adaptive, restart.adaptive),
        state=state,
        noise_decay=noise_decay,
        sampling=measure_every,
        ddp=dict(ddp_kwargs or {}),
        comm_hook=comm_hook,
        joiner=joiner,
    )
    job.profile.model = throughput
    return job


class Job(Readings):
    """One training, on however many GPUs it has at the moment. Made by `attach`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        scheduler: Any | None,
        scaler: Any | None,
        world: World,
        restart: Restart,
        *,
        rule: Rule,
        mode: tuple[Mode, bool],
        state: Stateful | None,
        noise_decay: float,
        sampling: int | None,
        ddp: dict[str, Any],
        comm_hook: CommunicationHook | None,
        joiner: Joiner | None = None,
    ) -> None:
        self.module = model
        """The model as the user passed it."""
        self.optimizer, self.scheduler, self.scaler, self.state = optimizer, scheduler, scaler, state
        self.world = world
        self.mode, self.adaptive = mode
        self.progress = Progress(initial=1)
        self.profile = StepProfile(knowledge.gpu_type(world.device, restart.ticket))
        self._restart, self._sampling, self._decay = restart, sampling, noise_decay
        first = self._first = TrainedModel(model, optimizer, scheduler, rule, noise_decay)
        self._companions: dict[str, TrainedModel] = {}
        self._averages = first.averages
        self._memory = MemoryBounds(world.device, restart.directory, self.profile.gpu_type)
        self._exchange = ControlExchange(world.control, first.norms.groups)
        self._resizer = Resizer(self, restart, self._exchange, joiner)
        self._stepper: Stepper | None = None
        restart.restore(self._parts(), self._exchange)
        self._timer = PassTimer(self.profile, clock_of(world.device))
        self._wrap(first, ddp, comm_hook)
        self.model: torch.nn.Module = first.model
        """The model to train with: wrapped in DistributedDataParallel where there are other ranks and it is plain."""
        restart.times.attached_at = time.time()

    @property
    def stepper(self) -> Stepper:
        """The step's own state; raises PolluxAgentError before `loader` was called."""
        if self._stepper is None:
            raise PolluxAgentError("make the loader before the loop: job.loader(dataset, batch_size=...)")
        return self._stepper

    def restart_report(self) -> dict[str, Any]:
        """Checkpoints, times and resizes of this attempt, as reported to the scheduler."""
        return self._restart.report() | self._resizer.report()

    # -- what the user calls ----------------------------------------------------------------------------------

    def add_model(
        self,
        name: str,
        model: torch.nn.Module,
        optimizer: Optimizer,
        scheduler: Any | None = None,
        *,
        scaling: str | Rule = "auto",
        ddp_kwargs: Mapping[str, Any] | None = None,
        comm_hook: CommunicationHook | None = None,
    ) -> AddedModel:
        """Train a further model by this job, as a GAN's critic; call it before `loader`, on all ranks alike.

        It is saved and restored under `name`, has a noise scale and learning-rate factors of its own, and shares
        the batches: the model with the least noise scale, to which a larger batch is worth least, decides on their
        size and on what a step counts. Arguments are as for `attach`. Raises PolluxAgentError.
        """
        if self._stepper is not None or not name or name in self._companions:
            raise PolluxAgentError(
                f"expected a further model before the loader is made, and under a name of its own; got {name!r}"
            )
        check_beside(self.module, model, name)
        rule = rule_for(scaling)
        trained_model = self._companions[name] = TrainedModel(model, optimizer, scheduler, rule, self._decay)
        self._exchange.groups += trained_model.norms.groups
        self._restart.restore_more(trained_model.parts(f"{name}."))
        self._wrap(trained_model, dict(ddp_kwargs or {}), comm_hook)
        return AddedModel(self, trained_model)

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        **options: Any,
    ) -> TrainingLoader:
        """The training data, `batch_size` (M0) examples per step over all GPUs, up to `max_batch_size` as it pays.

        `per_gpu` bounds one GPU's share of a pass: by default M0 / 32 to M0, which the user is taken to have run on
        one GPU. Other options are ElasticLoader's: shuffle, sampler, collate_fn, num_workers, pin_memory, drop_last; of
        an iterable dataset ElasticStream's: length (samples of a pass, about), transform, collate_fn, pin_memory,
        drop_last. Raises BatchError for sizes that contradict each other, DataError for data that cannot be divided.
        """
        if self._stepper is not None:
            raise PolluxAgentError("expected one training loader per job; evaluate with torch's DataLoader")
        if max_batch_size is None and self._restart.alone:
            self.adaptive = False  # nobody has asked for anything but plain training
        limits = batch_limits(batch_size, max_batch_size, per_gpu, adaptive=self.adaptive)
        limits = self._memory.within(limits, self._exchange.gather)
        self.progress.initial = batch_size
        for trained_model in self._trainees():
            trained_model.meter.begin(batch_size)
        at_first = initial_choice(limits, self.world.nodes, self.world.size, adaptive=self.adaptive)
        data = elastic_loader(
            dataset,
            batch_size=batch_size,
            rank=self.rank,
            world_size=self.world.size,
            local_batch=at_first.local_batch,
            seed=self._restart.seed,
            **options,
        )
        limits = within_pass(limits, data.length)
        choice = self._exchange.agree(Decision().with_choice(self._first_choice(limits))).choice
        data.set_batch(choice.local_batch)
        self._restart.restore_loader(data)
        self._stepper = Stepper(
            world=self.world,
            trained_models=self._trainees(),
            memory=self._memory,
            timer=self._timer,
            progress=self.progress,
            restart=self._restart,
            exchange=self._exchange,
            parts=self._parts,
            adaptive=self.adaptive,
            sampling=self._sampling,
            data=data,
            limits=limits,
            choice=choice,
            advisor=self._start_advisor(limits) if self.is_main else None,
            resizer=self._resizer,
            scaler=self.scaler if self.scaler is not None and self.scaler.is_enabled() else None,
        )
        told = introduction(self.module, limits, self.profile)
        if self.adaptive and self.is_main:
            tell_of_strangers(self._trainees())
        self._restart.publish(lambda: report_of(self), told, self._resizer.ask)
        self._resizer.arrived()
        return TrainingLoader(self, self._stepper)

    def epochs(
        self, count: float | None = None, *, passes: bool = False, steps: float | None = None
    ) -> Iterator[int]:
        """The epochs still to train, counted from 0: after a restart it goes on with the one that was interrupted.

        An epoch is statistical: |D| examples of M0-equivalent progress, however many passes through the data that
        takes; with `passes=True` one pass. Half an epoch at the end is half an epoch's progress. `steps` declares the
        length as so many optimizer steps of M0 examples instead, or what is worth as much. Ranks may leave and come
        between two steps (`resize.py`): a rank that leaves ends by SystemExit in the loop over the loader.
        """
        stepper, progress = self.stepper, self.progress
        length = stepper.data.length
        if (count is None) == (steps is None) or (passes and steps is not None):
            raise PolluxAgentError(
                "expected the length of training as a number of epochs, or as steps=N alone"
            )
        count = steps * progress.initial / length if steps is not None else count
        assert count is not None
        stepper.managed, stepper.passes_only = True, passes
        progress.target, progress.passes = (None, count) if passes else (count * length, None)
        self._resizer.begin()
        while progress.epoch < count:
            stepper.start_over()
            try:
                yield progress.epoch
            except GeneratorExit:
                stepper.left()
                raise
            progress.next_epoch(length, stepper.data.pass_index)
        stepper.finish()
        self._resizer.close()

    def micro_batch(self) -> MicroBatch:
        """Context of one forward and backward pass; only a step's last one synchronises the ranks."""
        return MicroBatch(self.model, self.stepper, self._meter)

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backpropagate this micro-batch's mean loss by its share of the step (and AMP's loss scale).

        `options` are those of `Tensor.backward`: retain_graph, create_graph, inputs.
        """
        share = weigh(self.stepper)
        scaled = loss * share if share != 1.0 else loss
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        scaled.backward(**options)  # type: ignore[no-untyped-call]

    def poll(self) -> None:
        """Let the scheduler's orders through where no steps are taken: in a long evaluation, every few batches.

        All ranks call it alike, between steps. An order to drain is answered there: this may not return.
        """
        self.stepper.poll()

    def close(self) -> None:
        """End the agent's threads and hooks; the model and the optimizer stay usable. All ranks call it.

        After a `break` out of `epochs` a last checkpoint is written: a restart goes on from there.
        """
        self._resizer.close()
        if self._stepper is not None:
            self._stepper.stop()
        self._exchange.take()
        if self._stepper is not None and self._stepper.advisor is not None:
            self._stepper.advisor.close()
        for trained_model in self._trainees():
            trained_model.close()
        self._restart.close()

    # -- within -----------------------------------------------------------------------------------------------

    def _trainees(self) -> list[TrainedModel]:
        return [self._first, *self._companions.values()]

    @property
    def _meter(self) -> NoiseMeter:
        return self._first.meter

    def _before_step(self, trained_model: TrainedModel) -> None:
        if self._stepper is not None:
            self._stepper.before_optimizer_step(trained_model)

    def _wrap(
        self, trained_model: TrainedModel, ddp: dict[str, Any], comm_hook: CommunicationHook | None
    ) -> None:
        follow(trained_model.rule, lambda: self.progress.steps)
        trained_model.wrap(
            self.world,
            scaler=self.scaler,
            sampling=self._sampling,
            ddp=ddp,
            comm_hook=comm_hook,
            on_ready=self._timer.ready,
            before_step=self._before_step,
            on_step=lambda: self._stepper.on_optimizer_step() if self._stepper is not None else None,
        )

    def _start_advisor(self, limits: BatchLimits) -> Advisor:
        advisor = Advisor(
            self.profile,
            limits,
            self.world.nodes,
            self.world.size,
            lambda: (self.noise_scale, self.stepper.choice),
            adaptive=self.adaptive,
            advises=self.mode is Mode.ADVISE,
            params=knowledge.kept(self._restart.known, self.profile),
        )
        advisor.start()
        return advisor

    def _first_choice(self, limits: BatchLimits) -> BatchChoice:
        known, nodes, gpus = self._restart.known, self.world.nodes, self.world.size
        if not self.adaptive or known is None:
            return initial_choice(limits, nodes, gpus, adaptive=self.adaptive)
        params, noise = knowledge.kept(known, self.profile), self.noise_scale
        return choose_on_arrival(limits, nodes, gpus, noise=noise, params=params, size=known.batch_size)

    def _parts(self) -> dict[str, Any]:
        """Everything with `state_dict` that a checkpoint holds, by name."""
        parts: dict[str, Any] = self._first.parts() | {
            "scaler": self.scaler,
            "user": self.state,
            "progress": self.progress,
            "memory": self._memory,
            "profile": self.profile,
        }
        for name, trained_model in self._companions.items():
            parts |= trained_model.parts(f"{name}.")
        return {name: part for name, part in parts.items() if part is not None}
