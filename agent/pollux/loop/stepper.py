"""One optimizer step after the other: its passes, what it was worth, and what rank 0 decided meanwhile.

The loader's iterator drives it (`loop.py`). Everything between two steps happens where the user's loop asks for the
next batch: the optimizer step is over, and the user's own calls after it too.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pollux.checkpoint.restart import Restart
from pollux.data.place import ElasticData
from pollux.goodput import BatchChoice, BatchLimits, gain
from pollux.learning_rate.progress import Progress
from pollux.loop.ending import Endings
from pollux.loop.memory import MemoryBounds
from pollux.loop.step_group import StepGroup
from pollux.loop.trained_model import TrainedModel, least_noise
from pollux.noise.measuring import sampling_interval
from pollux.ranks.control import EXCHANGE_INTERVAL, ControlExchange, Decision
from pollux.ranks.torch_internals import scaler_steps
from pollux.ranks.world import World
from pollux.resize.resizer import Resizer
from pollux.tuning.batch_choice import Advisor, initial_choice, nearest_choice
from pollux.tuning.knowledge import LastAttempt
from pollux.tuning.measurements import Configuration
from pollux.tuning.pass_timer import PassTimer

logger = logging.getLogger("pollux")

READINGS = 10
"""Exchanges of the ranks from one reading of samples to the next: seconds, which the averages over far more steps do
not feel. Steps so long that each ends in an exchange end in a reading, too."""


class Stepper(Endings):
    """Drives the optimizer steps of one job on this rank; all ranks' steppers do the same at the same steps."""

    def __init__(
        self,
        *,
        world: World,
        trained_models: Sequence[TrainedModel],
        memory: MemoryBounds,
        timer: PassTimer,
        progress: Progress,
        restart: Restart,
        exchange: ControlExchange,
        parts: Callable[[], Mapping[str, Any]],
        adaptive: bool,
        sampling: int | None,
        data: ElasticData,
        limits: BatchLimits,
        choice: BatchChoice,
        advisor: Advisor | None,
        resizer: Resizer,
        scaler: Any | None,
    ) -> None:
        self.data, self.limits, self.choice, self.advisor = data, limits, choice, advisor
        self.trained_models, self.timer, self.progress = trained_models, timer, progress
        self.meter = trained_models[0].meter
        self.memory = memory
        self.group: StepGroup | None = None
        self._weight = 1.0
        self.gain = 1.0
        """Steps of M0 examples that the last step was worth."""
        self.stepped = False
        """The optimizer has stepped since the last pass began."""
        self.accumulates = False
        """The loop uses `micro_batch`; without it each pass ends in a step."""
        self.passes_only = False
        """Epochs are passes through the data."""
        self.managed = False
        """`job.epochs` counts the epochs; else each loop over the loader is one."""
        self._world = world
        self._restart, self._exchange, self._parts = restart, exchange, parts
        self._adaptive, self._sampling = adaptive, sampling
        self._resizer = resizer
        self._scaler = scaler
        """AMP's loss scaling, where it is in use."""
        self._unscaled: Any = None
        """What the scaler kept of its optimizers when the pass began; its `update` makes that anew."""
        self._uncommitted = self._taken = self._usual = 0
        """Examples and passes since the last step, and how many passes before that."""
        self.failed = False
        """The last pass ran out of memory, and its step will be taken again."""
        self._looped = self._left = False
        self._step_seconds = 0.0
        self._last_end: float | None = None

    @property
    def batch_size(self) -> int:
        return self.choice.size(self._world.size)

    @property
    def share(self) -> float:
        """Weight of the present micro-batch's mean loss in the step's; read in the pass, when it is known to be one."""
        return self.data.weight * (self._weight if self.accumulates else 1.0)

    @property
    def synchronises(self) -> bool:
        """Whether the present pass is a step's last one."""
        if self.group is None:
            return not self.failed
        return not self.accumulates or self.group.synchronises

    @property
    def _bare(self) -> bool:
        """The loop does without `micro_batch`, and its gradients can be measured all the same."""
        return self._looped and not self.accumulates and self.meter.hooked

    # -- the loop over the loader -----------------------------------------------------------------------------

    def enter(self) -> None:
        self._restart.begin_training()
        self._pause()

    def leave(self) -> None:
        """The loop has ended, or was left: what its last step used is used.

        A step left half-way keeps its plan: its gradients are in `.grad`, and the next loop completes it.
        """
        if self.stepped:
            self._count()
        self._pause()
        if not self.managed and self.epoch_done():
            self.progress.next_epoch(self.data.length, self.data.pass_index)

    def _pause(self) -> None:
        self.timer.pause()
        self._last_end = None

    def epoch_done(self) -> bool:
        if self.passes_only:
            return self.data.pass_index > self.progress.pass_from
        return self.progress.epoch_done(self.data.length)

    def plan(self) -> None:
        """Before a pass is fetched: begin the next step where the last one is over."""
        if self.group is None or self.group.synchronises:
            self._begin_group()
        self.timer.fetch()

    def _begin_group(self) -> None:
        """Plan a step: how many passes, of how many examples, at which learning rate."""
        local, wanted = self.choice.local_batch, self.choice.accumulation + 1
        if self._looped and not self.accumulates:
            # Each pass ends in a step here: what would have been accumulated must fit into one.
            whole_step = local * wanted
            local, wanted = min(whole_step, self.limits.local_max, self.data.length), 1
            if local < min(whole_step, self.data.length) and self._world.rank == 0:
                message = (
                    "a loop without job.micro_batch() does not accumulate: per GPU %d examples a step, not %d"
                )
                warnings.warn(message % (local, whole_step), stacklevel=3)
        if self._splits(local, wanted):
            local, wanted = local // 2, 2
        self.data.set_batch(local)
        full = self._world.size * local
        left = self.data.length - self.data.position - self._uncommitted
        if self.data.drop_last:
            left -= left % full
        left = left if left > 0 else self.data.length
        passes = min(wanted, -(-left // full))
        samples = min(left, passes * full)
        self.group = StepGroup(passes, samples, local)
        whole = samples == wanted * full
        # At the end of a pass a step may be small, and its gradient noisy: it takes the rate of its own size.
        scale = samples / self.limits.initial if self._adaptive else None
        step = self.progress.optimizer_steps
        for trained_model in self.trained_models:
            if self.failed:
                # Now, and not before: another model's pass over the batch that did not fit may have come after it.
                trained_model.optimizer.zero_grad(set_to_none=True)
            trained_model.begin_step(step, passes, local, samples, whole=whole, scale=scale)

    def _splits(self, local: int, passes: int) -> bool:
        """Measure one GPU's gradient in two halves, which compare without the drift between successive steps.

        Not where the batch is to stay as it is (batch norm sees the halves), where workers would have to fetch it anew,
        or a half would fall below what the user allows.
        """
        return (
            passes == 1
            and self._adaptive
            and not self.meter.distributed
            and self.accumulates
            and local // 2 >= max(self.limits.local_min, 2)
            and self.data.num_workers == 0
            and any(t.meter.due(self.progress.optimizer_steps) for t in self.trained_models)
        )

    def begin_pass(self) -> None:
        """A micro-batch has been fetched."""
        assert self.group is not None
        weight = self.group.begin(self.data.samples, last=self.data.last_of_pass)
        self.stepped = self.failed = False
        self._weight = weight
        self._uncommitted += self.data.samples
        self._taken += 1
        self._unscaled = scaler_steps(self._scaler)
        if self._bare:
            for trained_model in self.trained_models:
                if trained_model.meter.hooked:
                    trained_model.meter.before_pass(True, first=self._taken == 1)
        world = self._world
        self.timer.begin(Configuration(world.nodes, world.size, self.group.local_batch, world.racks))

    def end_pass(self) -> None:
        """The user's body for this micro-batch is over."""
        if self.group is None:
            return  # it ran out of memory
        whole = self.data.samples == self._world.size * self.group.local_batch
        self.timer.end(synchronised=self.synchronises, counts=whole)
        self._looped = True

    def retry(self, limits: BatchLimits) -> None:
        """The pass ran out of memory: take its step again from its first sample, within smaller `limits`."""
        self.limits, size, world = limits, self.batch_size, self._world
        if self._adaptive:
            self.choice = nearest_choice(limits, world.nodes, world.size, size)
        else:
            self.choice = initial_choice(limits, world.nodes, world.size, adaptive=False)
        if self.advisor is not None:
            self.advisor.limits, self.advisor.proposal = limits, None
        for trained_model in self.trained_models:
            trained_model.meter.reset_batch()
        self.data.rewind()
        self._taken = 0
        self.group, self._uncommitted, self.failed = None, 0, True
        self.timer.cool()

    # -- the end of a step ------------------------------------------------------------------------------------

    def before_optimizer_step(self, trained_model: TrainedModel) -> None:
        """Called by the optimizers' hooks: where the loop has no contexts that would end a measured pass, this does."""
        if not self._bare or self.group is None or not trained_model.meter.hooked:
            return
        whole = self._uncommitted == self._taken * self._world.size * self.group.local_batch
        # The user may accumulate without telling: taken for that where it is as many passes as the last time.
        if self._taken == 1 or (whole and self._taken == self._usual):
            trained_model.meter.after_pass(True, self.share, self._taken)

    def on_optimizer_step(self) -> None:
        """Called by the optimizers' hooks: a step that AMP skips does not come here."""
        self.stepped = True
        if self._left:
            self._left = False
            self._restart.train_on()

    def efficiency(self, samples: int) -> float:
        """Progress per example of a step over `samples` examples, by what is known of the noise now: 1 up to M0."""
        scale = samples / self.limits.initial
        if not self._adaptive or scale <= 1.0:
            return 1.0
        return min(float(gain(least_noise(self.trained_models), 1.0, scale)) / scale, 1.0)

    def _count(self) -> None:
        """An optimizer step is behind us: its examples are used, and worth something."""
        samples, self._uncommitted, self.stepped = self._uncommitted, 0, False
        self._usual, self._taken = self._taken, 0
        self.data.commit()
        self.gain = self.progress.advance(samples, self.efficiency(samples))
        for trained_model in self.trained_models:
            trained_model.schedule.end(self.gain)

    def end_step(self) -> None:
        """Count the step, and act on what rank 0 decided; at the same step on every rank."""
        self._count()
        for trained_model in self.trained_models:
            trained_model.meter.end_step(self.progress.optimizer_steps)
        self._time_step()
        self._restart.after_step(self._parts)
        self._resizer.after_step()
        self._exchange_decisions()

    def _exchange_decisions(self) -> None:
        decision = self._exchange.step(self._decide)
        if decision is not None:
            self._act(decision)

    def poll(self) -> None:
        """Act on what rank 0 has decided by now, at once and on all ranks."""
        for decision in (self._exchange.take(), self._exchange.agree(self._decide())):
            if decision is not None:
                self._act(decision, resizes=False)

    @property
    def skipped(self) -> bool:
        """A step was due and AMP's loss scaling has dropped it: its gradients were not finite."""
        tried = scaler_steps(self._scaler) is not self._unscaled
        return tried and self.synchronises and not self.stepped and not self.failed

    def skip_step(self) -> None:
        """The batch is used up, as in plain training, and earned no progress."""
        self._uncommitted = self._taken = 0
        self.data.commit()
        self._exchange_decisions()

    def _time_step(self) -> None:
        now = time.perf_counter()
        if self._last_end is not None:
            seconds = now - self._last_end
            before = self._step_seconds
            # A pause now and then, of which the agent is not told, is no step.
            self._step_seconds = 0.9 * before + 0.1 * min(seconds, 2.0 * before) if before else seconds
        self._last_end = now

    def _decide(self) -> Decision:
        """What rank 0 wants of all; the other ranks' answer is not used."""
        if self._world.rank != 0:
            return Decision()
        choice = None
        if self.advisor is not None:
            choice, self.advisor.proposal = self.advisor.proposal, None
            if choice is not None and choice.local_batch > self.limits.local_max:
                choice = None  # chosen before memory ran out
        move, checkpoint = self._restart.wanted()
        seconds = self._step_seconds
        decision = Decision(
            move=move,
            resize=self._resizer.wanted(),
            checkpoint=checkpoint,
            sampling=self._sampling or sampling_interval([t.norms for t in self.trained_models], seconds),
            next_exchange=min(max(1, round(EXCHANGE_INTERVAL / seconds)), 50) if seconds > 0 else 1,
            noise=tuple(n for trained_model in self.trained_models for n in trained_model.measured()),
        )
        return decision if choice is None else decision.with_choice(choice)

    def _act(self, decision: Decision, *, resizes: bool = True) -> None:
        """`resizes`: a step has just ended, where ranks may leave and come; not in the midst of an evaluation."""
        noise = list(decision.noise)
        for trained_model in self.trained_models:
            own, noise = noise[: trained_model.norms.groups], noise[trained_model.norms.groups :]
            trained_model.agree(own, decision.sampling, 1 + READINGS * (decision.next_exchange - 1))
        if 0 < decision.local_batch <= self.limits.local_max:
            self.choice = decision.choice
            for trained_model in self.trained_models:
                trained_model.meter.reset_batch()
            self.timer.cool()
            if self._world.rank == 0:
                logger.info("batch size %d: %s", self.batch_size, self.choice)
        if decision.move or decision.checkpoint:
            seconds = self.save(durable=bool(decision.move))
            if decision.move:
                self._restart.drain(decision.move, seconds, self._exchange)
            self._pause()
        if decision.resize and resizes:
            self._resizer.act(decision.resize)
        elif decision.resize:
            self._resizer.put_off()

    def save(self, *, durable: bool) -> float | None:
        """A checkpoint, on all ranks after the same step; see `Restart.save`."""
        return self._restart.save(self._parts(), self.data, self._exchange, self._known(), durable=durable)

    # -- other ranks ------------------------------------------------------------------------------------------

    def whole(self) -> dict[str, Any]:
        """Rank 0's state at a step's end, for ranks that come in: a checkpoint's, and what ranks have agreed on."""
        return {
            "state": self._restart.state(self._parts(), self.data, self._known()),
            "meters": [(t.meter.agreed, t.meter.sampling, t.norms.steps) for t in self.trained_models],
            "limits": self.limits,
            "loop": (self._looped, self.accumulates),
        }

    def take_over(self, told: Mapping[str, Any]) -> None:
        """On a rank that comes in: go on from rank 0's state. Raises CheckpointError where it does not fit."""
        self._restart.take_over(self._parts(), self.data, told["state"])
        for trained_model, (agreed, sampling, steps) in zip(self.trained_models, told["meters"], strict=True):
            trained_model.meter.agreed, trained_model.meter.sampling, trained_model.norms.steps = (
                agreed,
                sampling,
                steps,
            )
        self.limits = told["limits"]
        self._looped, self.accumulates = told["loop"]

    def settle(self, world: World, choice: BatchChoice) -> None:
        """Go on among other ranks, from the next step on; every rank of `world` does so at the same one."""
        self._world, self._restart.world, self.choice, self.group = world, world, choice, None
        self._exchange.begin_anew(world.control)
        for trained_model in self.trained_models:
            trained_model.rewrap(world)
        self.meter = self.trained_models[0].meter
        self._usual = 0  # one that comes in knows of no step before
        self.data.resize(world.rank, world.size, choice.local_batch)
        if self.advisor is not None:
            self.advisor.moved(world.nodes, world.size)
        self._step_seconds = 0.0
        self.timer.cool()
        self._pause()

    def _known(self) -> LastAttempt:
        return LastAttempt(self.batch_size, None if self.advisor is None else self.advisor.params)
