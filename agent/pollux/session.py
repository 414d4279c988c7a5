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

The whole control of a step happens where the loop asks for the next batch: the optimizer step is over, and the
user's own calls after it too.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pollux.control import EXCHANGE_INTERVAL, ControlExchange, Decision
from pollux.data import ElasticLoader
from pollux.errors import BatchError, PolluxAgentError
from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams, gain
from pollux.loop import MicroBatch, PassTimer, StepGroup, TrainingLoader
from pollux.measuring import NoiseMeter
from pollux.noise_scale import DECAY, NoiseAverages
from pollux.precondition import GradientNorms
from pollux.profile import Configuration, StepProfile
from pollux.progress import Progress
from pollux.reporting import report_of
from pollux.restart import Restart, Times
from pollux.scaling import LearningRateScaler, Rule, rule_for
from pollux.schedule import ScaledSchedule
from pollux.snapshot import Stateful
from pollux.tuning import Advisor, BatchChoice, choose, initial_choice
from pollux.world import World, join

logger = logging.getLogger("pollux")

MAX_SAMPLING = 20
"""Optimizer steps from one measured gradient to the next, at most: 1/20 costs under 2 % of a step."""


def attach(
    model: torch.nn.Module,
    optimizer: Optimizer,
    scheduler: Any | None = None,
    *,
    scaler: Any | None = None,
    scaling: str | Rule = "auto",
    adaptive: bool | None = None,
    checkpoint_dir: str | os.PathLike[str] | None = None,
    seed: int = 0,
    state: Stateful | None = None,
    noise_decay: float = DECAY,
    sampling: int | None = None,
    ddp: Mapping[str, Any] | None = None,
) -> Job:
    """Join the job's other ranks, restore the newest checkpoint, and wrap `model` for training.

    `model` and `optimizer` are as for plain PyTorch, the model on its device; train with `job.model`, step with `optimizer`.
    `scheduler` and `scaler` (AMP) are saved, restored and scaled along. `scaling` names the learning-rate rule.
    `adaptive` lets the batch size change; None: inside a Pollux job, unless its directives say `adaptive=no`; elsewhere
    where POLLUX_ADAPTIVE=yes. `state` is the user's own, with `state_dict` and `load_state_dict`. `sampling` is the number of
    optimizer steps from one measured gradient to the next (None: 1 to 20, by cost). `ddp` holds further
    arguments for DistributedDataParallel.

    Raises LaunchError where the ranks' environment makes no sense, CheckpointError where a checkpoint cannot be used.
    """
    parameter = next((p for p in model.parameters() if p.requires_grad), None)
    if parameter is None:
        raise PolluxAgentError(
            "expected a model with parameters to train, found none that requires a gradient"
        )
    times = Times.from_environment()
    world = join(parameter.device)
    times.rendezvous_at = time.time()
    restart = Restart(world, checkpoint_dir, seed=seed, times=times)
    wanted = restart.adaptive if adaptive is None else adaptive
    job = Job(
        model, optimizer, scheduler, scaler, world, restart, rule_for(scaling, optimizer), wanted, state
    )
    job.start(noise_decay=noise_decay, sampling=sampling, ddp=dict(ddp or {}))
    return job


class Job:
    """One training, on however many GPUs it has at the moment."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        scheduler: Any | None,
        scaler: Any | None,
        world: World,
        restart: Restart,
        rule: Rule,
        adaptive: bool,
        state: Stateful | None,
    ) -> None:
        self.module = model
        self.model: torch.nn.Module = model
        """The model to train with: wrapped in DistributedDataParallel where there are other ranks."""
        self.optimizer, self.scheduler, self.scaler, self.state = optimizer, scheduler, scaler, state
        self.world = world
        self.adaptive = adaptive
        self.accumulates = False
        """Whether the loop uses `micro_batch`: without it each pass ends in a step."""
        self.progress = Progress(initial=1)
        self.profile = StepProfile()
        self.timer = PassTimer(self.profile)
        self.meter: NoiseMeter
        self.group: StepGroup | None = None
        self.stepped = False
        self.share = 1.0
        self.gain = 1.0
        """Steps of M0 examples that the last step was worth."""
        self._rule = rule
        self._restart = restart
        self._norms = GradientNorms(optimizer)
        self._averages = NoiseAverages(self._norms.groups)
        self._schedule = ScaledSchedule(scheduler)
        self._rates = LearningRateScaler(optimizer, on_step=self._on_optimizer_step)
        self._limits: BatchLimits | None = None
        self._choice = BatchChoice(1, 0)
        self._data: ElasticLoader | None = None
        self._advisor: Advisor | None = None
        self._exchange = ControlExchange(world.control, self._norms.groups)
        self._uncommitted = 0
        self._seen_micro_batch = False
        self._looped = False
        self._managed = False
        self._passes = False
        self._sampling: int | None = None
        self._step_seconds = 0.0
        self._last_end: float | None = None

    def start(self, *, noise_decay: float, sampling: int | None, ddp: dict[str, Any]) -> None:
        """Second half of `attach`: restore, then wrap."""
        if sampling is not None and sampling < 1:
            raise PolluxAgentError(
                f"expected to measure every so many steps, 1 or more, got sampling={sampling}"
            )
        self._sampling = sampling
        self._averages.decay = noise_decay
        self._restart.current_batch = lambda: self.batch_size
        self._restart.restore(self._parts(), self._exchange)
        self._norms.count_from_state()
        device = self.world.device
        if self.world.distributed:
            if device.type == "cuda":
                ddp.setdefault("device_ids", [device])
            self.model = DistributedDataParallel(self.module, **ddp)
        self.meter = NoiseMeter(
            self.model,
            self._norms,
            self._averages,
            device=device,
            scaler=self.scaler,
            on_ready=self.timer.ready,
        )
        self.meter.sampling = sampling or 1
        self.meter.agreed = tuple(self._averages.groups() or ())
        self._restart.times.attached_at = time.time()

    # -- what the user reads ----------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0: print, log and write results there."""
        return self.world.rank == 0

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def local_batch(self) -> int:
        """m: examples per GPU and pass."""
        return self._choice.local_batch

    @property
    def accumulation(self) -> int:
        """s: passes without synchronisation before the synchronising one."""
        return self._choice.accumulation

    @property
    def batch_size(self) -> int:
        """M: examples per optimizer step, over all GPUs."""
        return self._choice.size(self.world.size)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale as all ranks know it; None until measured."""
        return self.meter.total

    @property
    def data(self) -> ElasticLoader:
        """The training data; raises PolluxAgentError before `loader` was called."""
        if self._data is None:
            raise PolluxAgentError("make the loader before the loop: job.loader(dataset, batch_size=...)")
        return self._data

    @property
    def limits(self) -> BatchLimits:
        """The batch sizes that the user allows."""
        if self._limits is None:
            raise PolluxAgentError("the batch limits are known once job.loader(...) was called")
        return self._limits

    @property
    def params(self) -> ThroughputParams | None:
        """The fitted throughput model; None before the first fit, and on ranks other than 0."""
        return self._advisor.params if self._advisor is not None else None

    @property
    def dataset_length(self) -> int:
        """|D|: examples in a pass."""
        return self.data.length

    def restart_report(self) -> dict[str, Any]:
        """Checkpoints and times of this attempt, as reported to the scheduler."""
        return self._restart.report()

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor on each parameter group's learning rate at the next step."""
        return tuple(self._rates.factors)

    @property
    def sync_gradients(self) -> bool:
        """True from the last micro-batch of a step on: clip, step and zero the gradients then."""
        return self.group is None or not self.accumulates or self.group.synchronises

    # -- what the user calls ----------------------------------------------------------------------------------

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        **options: Any,
    ) -> TrainingLoader:
        """The training data, `batch_size` (M0) examples per step over all GPUs, up to `max_batch_size` as it pays.

        `per_gpu` bounds one GPU's share of a pass; by default its upper end is M0 (what the user ran on one GPU), its lower one
        M0 / 32. Other options are ElasticLoader's: shuffle, sampler, collate_fn, num_workers, pin_memory, drop_last.
        Raises BatchError for sizes that contradict each other.
        """
        if self._data is not None:
            raise PolluxAgentError(
                "expected one training loader per job; use torch's DataLoader for evaluation"
            )
        low, high = per_gpu if per_gpu is not None else (max(1, batch_size // 32), batch_size)
        try:
            limits = BatchLimits(batch_size, max_batch_size or batch_size, low, high)
        except ValueError as error:
            raise BatchError(str(error)) from error
        self._limits = limits
        self.progress.initial = batch_size
        self.meter.initial = batch_size
        self._choice = self._exchange.agree(self._decision(self._first_choice(limits))).choice
        self._data = ElasticLoader(
            dataset,
            rank=self.rank,
            world_size=self.world.size,
            local_batch=self._choice.local_batch,
            seed=self._restart.seed,
            **options,
        )
        self._restart.restore_loader(self._data)
        if self.is_main:
            self._advisor = Advisor(
                self.profile,
                limits,
                self.world.nodes,
                self.world.size,
                lambda: (self.noise_scale, self._choice),
                adaptive=self.adaptive,
            )
            self._advisor.start()
        self._restart.publish(lambda: report_of(self))
        return TrainingLoader(self, self._data)

    def epochs(self, count: float, *, passes: bool = False) -> Iterator[int]:
        """The epochs still to train, counted from 0: after a restart it goes on with the one that was interrupted.

        An epoch is statistical: |D| examples of M0-equivalent progress, however many passes through the data that takes;
        with `passes=True` one pass. Half an epoch at the end is half an epoch's progress.
        """
        self._managed, self._passes = True, passes
        length = self.data.length
        self.progress.target = None if passes else float(count * length)
        while self.progress.epoch < count:
            yield self.progress.epoch
            self.progress.next_epoch(length, self.data.pass_index)
        self._finish()

    def micro_batch(self) -> MicroBatch:
        """Context of one forward and backward pass; only a step's last one synchronises the ranks."""
        return MicroBatch(self)

    def backward(self, loss: Tensor) -> None:
        """Backpropagate this micro-batch's mean loss by its share of the step (and AMP's loss scale)."""
        scaled = loss * self.share if self.share != 1.0 else loss
        if self.scaler is not None:
            scaled = self.scaler.scale(scaled)
        scaled.backward()  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """End the agent's threads and hooks; the model and the optimizer stay usable."""
        self._exchange.take()
        if self._advisor is not None:
            self._advisor.close()
        self.meter.close()
        self._rates.remove()
        self._restart.close()

    # -- the step, driven by the loop -------------------------------------------------------------------------

    def enter_loop(self) -> None:
        self.timer.pause()
        self._last_end = None
        self.group = None

    def leave_loop(self) -> None:
        """The loop over the loader has ended, or was left: what its last step used is used."""
        if self.stepped:
            self._count_step()
        self.group = None
        self.timer.pause()
        if not self._managed and self.epoch_done():
            self.progress.next_epoch(self.data.length, self.data.pass_index)

    def epoch_done(self) -> bool:
        if self._passes:
            return self.data.pass_index > self.progress.pass_from
        return self.progress.epoch_done(self.data.length)

    def begin_group(self) -> None:
        """Plan the next step: how many passes, of how many examples, at which learning rate."""
        data, meter = self.data, self.meter
        local, wanted = self._choice.local_batch, self._choice.accumulation + 1
        if self._looped and not self.accumulates:
            # Each pass ends in a step here: what would have been accumulated must fit into one.
            local, wanted = min(local * wanted, self.limits.local_max, data.length), 1
        if self._splits(meter, local, wanted):
            local, wanted = local // 2, 2
        data.set_batch(local)
        full = self.world.size * local
        left = data.length - data.position - self._uncommitted
        if data.drop_last:
            left -= left % full
        left = left if left > 0 else data.length
        passes = min(wanted, -(-left // full))
        samples = min(left, passes * full)
        whole = samples == wanted * full
        self.group = StepGroup(passes, samples, local, whole)
        meter.begin_group(self.progress.optimizer_steps, passes, local, samples, whole=whole)
        self._schedule.begin()
        self._rates.factors = self._factors()

    def _splits(self, meter: NoiseMeter, local: int, passes: int) -> bool:
        """Measure one GPU's gradient in two halves: the two compare without the drift between successive steps.

        Workers would have to fetch the batch anew, and a half must not fall below what the user allows.
        """
        data = self._data
        assert data is not None and self._limits is not None
        return (
            passes == 1
            and not meter.distributed
            and self.accumulates
            and local // 2 >= max(self.limits.local_min, 2)
            and data.num_workers == 0
            and meter.due(self.progress.optimizer_steps)
        )

    def _factors(self) -> list[float]:
        scale = self.batch_size / self.limits.initial
        if not self.adaptive or scale <= 1.0:
            return []
        groups: Sequence[NoiseScale | None] = self.meter.agreed or [None] * self._norms.groups
        return [self._rule(scale, noise) for noise in groups]

    def begin_pass(self) -> None:
        data, group = self.data, self.group
        assert group is not None
        group.done += 1
        self.share = (
            data.weight * data.samples / group.samples
            if self.accumulates or not self._looped
            else data.weight
        )
        self.stepped = False
        self._uncommitted += data.samples
        self.timer.begin(Configuration(self.world.nodes, self.world.size, group.local_batch))

    def end_pass(self) -> None:
        """The user's body for this micro-batch is over."""
        assert self.group is not None
        whole = self.data.samples == self.world.size * self.group.local_batch
        self.timer.end(synchronised=self.sync_gradients, counts=whole)
        self._looped = True

    def _on_optimizer_step(self) -> None:
        self.stepped = True
        self._norms.steps += 1

    def _count_step(self) -> None:
        """An optimizer step is behind us: its examples are used, and worth something."""
        samples, self._uncommitted, self.stepped = self._uncommitted, 0, False
        self.data.commit()
        scale = samples / self.limits.initial
        noise = self.noise_scale
        worth = 1.0
        if self.adaptive and scale > 1.0:
            worth = min(float(gain(noise, 1.0, scale)) / scale, 1.0)
        self.gain = self.progress.advance(samples, worth)
        self._schedule.end(self.gain)

    def end_step(self) -> None:
        """After an optimizer step, at the same one on every rank: count it, and act on what rank 0 decided."""
        self._count_step()
        self.meter.end_step(self.progress.optimizer_steps)
        self._time_step()
        self._restart.after_step()
        if self._exchange.due():
            decision = self._exchange.swap(self._decide())
            if decision is not None:
                self._act(decision)

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            seconds = now - self._last_end
            self._step_seconds = (
                seconds if self._step_seconds == 0 else 0.9 * self._step_seconds + 0.1 * seconds
            )
        self._last_end = now

    def _decide(self) -> Decision:
        """What rank 0 wants of all; other ranks' answer is not used."""
        if not self.is_main:
            return Decision()
        choice = None
        if self._advisor is not None:
            choice, self._advisor.proposal = self._advisor.proposal, None
        reallocation, checkpoint = self._restart.wanted()
        return replace(
            self._decision(choice),
            reallocation=reallocation,
            checkpoint=checkpoint,
            noise=tuple(self._averages.groups() or ()),
        )

    def _decision(self, choice: BatchChoice | None) -> Decision:
        step = self._step_seconds
        every = max(1, round(EXCHANGE_INTERVAL / step)) if step > 0 else 1
        local, accumulation = (choice.local_batch, choice.accumulation) if choice is not None else (0, 0)
        return Decision(
            local_batch=local,
            accumulation=accumulation,
            sampling=self._sampling or self._sampling_interval(),
            next_exchange=min(every, 50),
        )

    def _sampling_interval(self) -> int:
        """Every step while steps are slow beside the few passes over the gradient that a measurement is, else seldom."""
        if self._step_seconds <= 0:
            return 1
        size = sum(p.numel() for p in self._norms.group_of)
        cost = 2e-4 + 4e-9 * size * (3 if self._norms.moment else 1)
        return int(min(max(cost / (0.005 * self._step_seconds), 1), MAX_SAMPLING))

    def _act(self, decision: Decision) -> None:
        """Equal on every rank, after the same optimizer step."""
        self.meter.agreed = decision.noise or self.meter.agreed
        self.meter.sampling = decision.sampling
        if decision.local_batch:
            self._choice = decision.choice
            self.meter.reset_batch()
            self.timer.cool()
            logger.info("batch size %d (%s)", self.batch_size, self._choice)
        if decision.reallocation or decision.checkpoint:
            seconds = self._restart.save(self._parts(), self.data, self._exchange)
            if decision.reallocation:
                self._restart.drain(decision.reallocation, seconds, self._exchange)
            self.timer.pause()
            self._last_end = None

    # -- starting, saving, ending -----------------------------------------------------------------------------

    def _first_choice(self, limits: BatchLimits) -> BatchChoice:
        """On a new placement: by the model where it is known already, near the batch size in use before."""
        before = self._restart.batch_size
        noise = self.noise_scale
        if self.adaptive and self.is_main and noise is not None and before is not None:
            params = self.profile.fit()
            if params is not None:
                found = choose(
                    params, noise, limits, self.world.nodes, self.world.size, None, current_size=before
                )
                if found is not None:
                    return found
        return initial_choice(limits, self.world.nodes, self.world.size, adaptive=self.adaptive)

    def _parts(self) -> dict[str, Any]:
        """Everything with `state_dict` that a checkpoint holds, by name."""
        parts: dict[str, Any] = {
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "user": self.state,
            "progress": self.progress,
            "noise": self._averages,
            "profile": self.profile,
            "schedule": self._schedule,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def _finish(self) -> None:
        """Training is over: nothing is lost from here on, whatever happens to the job."""
        if self.progress.finished:
            return
        self.progress.finished = True
        self._exchange.take()
        self._restart.finish(self._parts(), self.data, self._exchange)
