"""Take the optimizer steps: plan passes, measure, count progress.

The loader's iterator (`batches.py`) and the optimizers' hooks call this module. Work between two steps happens when the
user's loop asks for the next batch: the optimizer step and the user's own calls after it are then over.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pollux.errors import LoopMistake, OutOfMemory
from pollux.goodput import BatchChoice, BatchLimits
from pollux.loop.batch_in_hand import BatchInHand
from pollux.loop.divergence import writes
from pollux.loop.script_checks import look_for_unused, warn_of_unknown_parameters
from pollux.loop.slips import (
    CALLED_PER_PASS,
    EARLY_STEP,
    IDLE,
    IDLE_PASSES,
    OWN_EPOCHS,
    OWN_PASSES,
    STEP_WITHOUT_PASS,
)
from pollux.loop.units import Units
from pollux.ranks.torch_internals import scaler_steps
from pollux.training.memory import is_out_of_memory
from pollux.training.plain_steps import alike
from pollux.training.step import StepGroup
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training
from pollux.tuning.batch_choice import initial_choice, nearest_choice
from pollux.tuning.measurements import Configuration

logger = logging.getLogger("pollux")


class Stepper:
    """Takes the optimizer steps of one training on this rank. All ranks' steppers take the same steps."""

    def __init__(self, training: Training) -> None:
        self.training = training
        scaler = training.scaler
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        """AMP's loss scaling, where it is in use."""
        self._warned_of_own_passes = False
        self.quiet: Callable[[], int] = lambda: 0
        """Returns how many coming steps bring no decision and no check of the ranks."""
        self._each_time: Callable[[], None] | None = None
        """What a step that is as the one before still needs."""
        self.in_hand, self.units = BatchInHand(training), Units(training)

    @property
    def share(self) -> float:
        """Weight of the present micro-batch's mean loss in the step's. Valid within the pass."""
        step = self.training.step
        return self.training.data.weight * (step.weight if step.accumulates else 1.0)

    @property
    def synchronises(self) -> bool:
        """Whether the present pass is a step's last one."""
        step = self.training.step
        if step.group is None:
            return not step.failed
        return not step.accumulates or step.group.synchronises

    @property
    def _bare(self) -> bool:
        """Gradients are measured, although the loop does not use `micro_batch`."""
        step = self.training.step
        return step.looped and not step.accumulates and self.training.models[0].meter.hooked

    # -- the loop over the loader -----------------------------------------------------------------------------

    def enter(self) -> None:
        """A loop over the loader begins."""
        self.in_hand.enter()
        self.plan_anew()
        for model in self.training.models:
            model.new_loop = True

    def leave(self) -> None:
        """Count the last step's examples: the loop has ended or was left, and the next one completes its step."""
        training = self.training
        Units.running = None
        self.commit_in_hand()
        training.step.plain = False
        self.plan_anew()
        training.step.writes = writes(training)
        training.pause()
        if not training.step.managed and self.epoch_done():
            if training.progress.epoch == 0 and training.world.rank == 0:
                logger.warning(OWN_EPOCHS)
            training.progress.next_epoch(training.data.length, training.data.pass_index)

    def epoch_done(self) -> bool:
        training, progress = self.training, self.training.progress
        if training.step.passes_only:
            left = 1.0 if progress.passes is None else progress.passes - progress.epoch
            ended = training.data.pass_index > progress.pass_from
            return ended or (left < 1.0 and training.data.position >= left * training.data.length)
        return training.progress.epoch_done(training.data.length)

    def plan(self) -> None:
        """Before fetching a pass: begin a step where the last one is over."""
        step = self.training.step
        if step.alike > 0:
            step.alike -= 1
            step.plain = self.training.data.alike = True
            self.training.timer.steps += 1
            if self._each_time is not None:
                self._each_time()
            return
        step.plain = False
        begins = step.group is None or step.group.synchronises
        if begins:
            if step.group is not None and step.group.left_out and step.uncommitted:
                self._give_up()
            self._begin_group()
        self.training.timer.fetch(begins=begins, measured=step.measured)
        if begins and step.group is not None and step.group.passes == 1:
            settled = self._scaler is None and not self.in_hand.first
            step.alike = alike(self.training, step.group, self.quiet) if settled else 0
            if step.alike > 0:
                model = self.training.models[0]
                self._each_time = model.again if model.follows_each_step else None

    def plan_anew(self) -> None:
        """Something has changed that steps are planned by."""
        self.training.step.alike = 0

    def _give_up(self) -> None:
        """Forget a step with a pass left out: its samples count as used, its gradients are no part of the next."""
        training = self.training
        training.step.group = None
        self.plan_anew()
        for model in training.models:
            model.optimizer.zero_grad(set_to_none=True)
        self.skip_step()

    def _begin_group(self) -> None:
        """Plan a step: its passes, their examples, the learning rate."""
        training = self.training
        step, data, limits, world = training.step, training.data, training.limits, training.world
        local, wanted = training.choice.local_batch, training.choice.accumulation + 1
        if step.looped and not step.accumulates:
            if training.adaptive and training.progress.optimizer_steps and not self._warned_of_own_passes:
                self._warned_of_own_passes = True
                if world.rank == 0:
                    logger.warning(OWN_PASSES)
            # Each pass ends in a step here: the step's examples must fit into one pass.
            whole_step = local * wanted
            local, wanted = min(whole_step, limits.local_max, data.length), 1
            if local < min(whole_step, data.length) and world.rank == 0:
                message = (
                    "a loop without job.micro_batch() does not accumulate: per GPU %d examples a step, not %d"
                )
                warnings.warn(message % (local, whole_step), stacklevel=3)
            training.choice = BatchChoice(local, 0)
        halved = training.adaptive and self._splits(local, wanted)
        if halved:
            local, wanted = local // 2, 2
        data.set_batch(local)
        passes, samples = data.ahead(wanted)
        step.group = StepGroup(passes, samples, local)
        step.tokens = step.weights = None
        step.measured = False
        whole = samples == wanted * world.size * local
        # At the end of a pass a step may be small, and its gradient noisy: its learning rate is the one for its size.
        scale = samples / limits.initial if training.adaptive else None
        number = training.progress.optimizer_steps
        for model in training.models:
            if step.failed:
                # Only now: another model may have made a pass over the batch after the one that did not fit.
                model.optimizer.zero_grad(set_to_none=True)
            model.begin_step(number, passes, local, samples, whole=whole, halved=halved, scale=scale)
            step.measured = step.measured or model.meter.measures

    def _splits(self, local: int, passes: int) -> bool:
        """Whether to measure one GPU's gradient in two halves, which compare without the drift between steps.

        Not where the batch must stay whole (batch norm), where workers would fetch it again, or where a half would be
        smaller than the user's bound.
        """
        training = self.training
        return (
            passes == 1
            and not training.models[0].meter.distributed
            and training.step.accumulates
            and local // 2 >= max(training.limits.local_min, 2)
            and training.data.num_workers == 0
            and any([model.meter.due(training.progress.optimizer_steps) for model in training.models])
        )

    def begin_pass(self) -> None:
        """A micro-batch has been fetched."""
        training, step, data = self.training, self.training.step, self.training.data
        if step.plain and step.group is not None:
            step.group.weighed = step.stepped = training.models[0].passed = False
            step.tokens = step.weights = None
            step.uncommitted += data.samples
            step.taken += 1
            return
        assert step.group is not None
        step.weight = step.group.begin(data.samples, last=data.last_of_pass)
        step.stepped = step.failed = False
        step.uncommitted += data.samples
        step.taken += 1
        if self._scaler is not None:
            step.unscaled = scaler_steps(self._scaler)
        for model in training.models:
            model.passed = False
            if not step.accumulates:
                self.begin_model(model)
        if not step.accumulates and self._bare:
            for model in training.models:
                if model.meter.hooked:
                    model.meter.before_pass(True, first=step.taken == 1)
        world = training.world
        if training.timer.timing:
            training.timer.begin(Configuration(world.nodes, world.size, step.group.local_batch, world.racks))

    def begin_model(self, model: TrainedModel) -> None:
        """Before a model's first pass of a step: see which parameters it trains; a GAN's critic may be frozen before.

        On one rank only measured steps need it.
        """
        training, group = self.training, self.training.step.group
        if group is None or not (model.meter.looks or model.new_loop):
            return
        if model.follow_parameters(training.world) and training.world.rank == 0:
            warn_of_unknown_parameters(training.models)

    def end_pass(self) -> None:
        """The user's body for this micro-batch is over."""
        training, step = self.training, self.training.step
        if step.plain:
            if training.models[0].passed:
                return
            self.plan_anew()
        if step.group is None:
            return  # it ran out of memory
        if self.in_hand.first:
            self.in_hand.after_pass(skipped=self.skipped)
        if training.timer.timing:
            whole = training.data.samples == training.world.size * step.group.local_batch
            training.timer.end(synchronised=self.synchronises, counts=whole)
        step.looped = True
        if step.group.passes > 1:
            self.units.after_pass()
        if step.accumulates and not (
            training.models[0].passed or any([m.passed for m in training.models[1:]])
        ):
            step.group.left_out = True
            self.plan_anew()
            if training.world.distributed:
                self.in_hand.tell_left_out()

    def begin_data(self) -> None:
        """A pass through the data begins, or goes on."""
        self.training.data.begin_pass()
        self.training.step.tried = self.training.data.position > 0

    def end_data(self) -> None:
        """A pass through the data is over.

        Warn where the whole pass made no step. Raises LoopMistake at the third one.
        """
        step = self.training.step
        step.idle = 0 if step.tried else step.idle + 1
        if step.idle >= IDLE_PASSES:
            raise LoopMistake(IDLE)
        if step.idle == 1 and self.training.world.rank == 0:
            logger.warning(IDLE)

    # -- out of memory ----------------------------------------------------------------------------------------

    def caught(self, error: BaseException) -> bool:
        """Whether the step of a pass that failed with `error` will be taken again, in smaller passes.

        One rank takes it again from its first sample: nothing of it was used yet. Of several, the others wait in an
        all-reduce that the failed rank cannot join in the same order. The bound is written beside the checkpoints, and
        this raises OutOfMemory: `pollux run` (or torchrun with --max-restarts) starts all ranks from the newest
        checkpoint. Without a folder the error stays as it is. False: no smaller pass is left, as where memory leaks.
        """
        training, step = self.training, self.training.step
        memory, limits = training.memory, training.limits
        if not is_out_of_memory(error):
            return False
        if step.failed:
            return True  # another model's pass over the same batch, which the agent has already abandoned
        if step.group is None:
            return False
        failed = step.group.local_batch
        bound = failed // 2
        if bound < limits.local_min:
            return False
        # A reduction cannot be broken off half-way.
        first = training.models[0]
        alone = not training.world.distributed and not first.reduces
        if not alone and memory.directory is None:
            return False
        memory.lower(bound)
        message = f"{failed} examples per GPU do not fit into the memory of {memory.gpu_type}: the bound is now {bound}"
        if not alone:
            raise OutOfMemory(f"{message}; all ranks start again from the newest checkpoint") from error
        logger.warning("%s; the step is taken again", message)
        self.retry(replace(limits, local_max=min(limits.local_max, bound)))
        return True

    def _begin_again(self) -> None:
        """Repeat the current step from its first sample."""
        training, step = self.training, self.training.step
        if step.in_hand:  # one of several models has stepped
            training.progress.take_back(step.uncommitted, step.gain)
        step.group, step.uncommitted, step.taken = None, 0, 0
        step.stepped, step.in_hand, step.failed = False, False, True
        step.plain = False
        self.plan_anew()

    def retry(self, limits: BatchLimits) -> None:
        """Take the step again from its first sample, within `limits`."""
        training, world = self.training, self.training.world
        size = training.batch_size
        training.limits, training.most_per_gpu = limits, limits.local_max
        if training.adaptive:
            training.choice = nearest_choice(limits, world.nodes, world.size, size)
        else:
            training.choice = initial_choice(limits, world.nodes, world.size, adaptive=False)
        if training.advisor is not None:
            training.advisor.limits, training.advisor.proposal = limits, None
        for model in training.models:
            model.meter.reset_batch()
        training.data.rewind()
        self._begin_again()
        training.timer.cool()

    # -- the end of a step ------------------------------------------------------------------------------------

    def before_optimizer_step(self, model: TrainedModel, _: Any, args: Any, options: Any) -> None:
        """End a measured pass where the loop has no contexts that would. The optimizers' hook: `args` has the first."""
        if not (self.training.step.plain and model.passed):
            self._end_measured(model, args, options)

    def _end_measured(self, model: TrainedModel, args: Any, options: Any) -> None:
        training, step = self.training, self.training.step
        group = step.group
        closure = (
            len(args) > 1 or options.get("closure") is not None
        )  # it runs the step's last pass, after this hook
        if model.unused_looks:
            look_for_unused(model, training.world.rank)
        if step.in_epoch and not step.accumulates:
            self.in_hand.check()
        if not closure and step.accumulates and group is not None:
            if not group.synchronises:
                if group.begun:
                    raise LoopMistake(EARLY_STEP.format(group.begun, group.passes))
            elif (
                not (model.passed or model.in_pass or step.stepped or step.failed)
                and training.world.distributed
                and not any([m.passed or m.in_pass for m in training.models])
            ):
                raise LoopMistake(STEP_WITHOUT_PASS)
        if step.accumulates or not self._bare or step.group is None or not model.meter.hooked:
            return
        whole = step.uncommitted == step.taken * training.world.size * step.group.local_batch
        # The user may accumulate without telling the agent. Assume so if the last step had as many passes.
        if step.taken == 1 or (whole and step.taken == step.usual):
            model.meter.after_pass(True, self.share, step.taken)

    def keeps_gradients(self, model: TrainedModel) -> bool:
        """Tell whether `zero_grad` would now lose gradients of earlier passes: it is ignored, at the top of a body."""
        step, group = self.training.step, self.training.step.group
        if not step.accumulates or group is None or not group.begun:
            return False
        if model.passed:
            return not group.synchronises
        return group.begun > 1

    def on_optimizer_step(self) -> None:
        """Count a step's progress: the optimizers' hook, unless AMP skips it. Of several, the first one counts."""
        training, step = self.training, self.training.step
        if step.stepped:
            return
        step.stepped = step.in_hand = step.tried = True
        samples = step.uncommitted
        efficiency = training.efficiency(samples) if training.adaptive else 1.0
        step.gain = training.progress.advance(samples, efficiency)

    def commit_in_hand(self) -> None:
        """Use up the examples of a step whose body is over, or left: a checkpoint now would hold its weights."""
        training, step = self.training, self.training.step
        if not step.in_hand:
            return
        # A schedule that is made for passes ends with them, whatever a larger batch's examples are worth.
        worth = step.uncommitted / training.progress.initial if step.passes_only else step.gain
        step.in_hand = False
        step.uncommitted = 0
        step.usual, step.taken = step.taken, 0
        training.data.commit()
        step.scheduler_calls = 0
        for model in training.models:
            if model.schedule.steps:
                step.scheduler_calls = max(step.scheduler_calls, model.schedule.end(worth))

    def end_plain_step(self) -> None:
        """End a step that was as the one before."""
        training, step = self.training, self.training.step
        model = training.models[0]
        if model.schedule.steps:
            self.end_step()
            return
        step.in_hand = step.stepped = False
        step.uncommitted, step.usual, step.taken = 0, step.taken, 0
        training.data.commit()
        if model.meter.looks:  # there are other ranks: all of them read samples after the same step
            model.meter.end_step(training.progress.optimizer_steps)
        step.untold += 1

    def end_step(self) -> None:
        """End the step that the optimizer has made. At the same step on every rank."""
        self.commit_in_hand()
        training, step = self.training, self.training.step
        step.stepped = False
        if step.scheduler_calls > 1:
            raise LoopMistake(CALLED_PER_PASS.format(step.scheduler_calls))
        for model in training.models:
            model.meter.end_step(training.progress.optimizer_steps)
            if model.schedule.asks:
                self.units.after_step(model.schedule)
        if training.own_average is not None and step.gain > 1.0 and training.world.rank == 0:
            model = training.models[0]
            training.own_average = training.own_average.look(model.module, training.progress.optimizer_steps)
        self._time_step()

    @property
    def skipped(self) -> bool:
        """AMP's loss scaling dropped a due step: gradients were not finite."""
        step = self.training.step
        tried = self._scaler is not None and scaler_steps(self._scaler) is not step.unscaled
        return tried and self.synchronises and not step.stepped and not step.failed

    def skip_step(self) -> None:
        """As in plain training, the batch counts as used. It made no progress."""
        step = self.training.step
        step.tried = True
        step.uncommitted = step.taken = 0
        self.training.data.commit()

    def _time_step(self) -> None:
        step, now = self.training.step, time.perf_counter()
        if step.ended_at is not None:
            seconds, before = (now - step.ended_at) / (1 + step.untold), step.seconds
            # An occasional pause without a report to the agent is no step.
            step.seconds = 0.9 * before + 0.1 * min(seconds, 2.0 * before) if before else seconds
        step.ended_at, step.untold = now, 0
