"""The `Job` that `attach` returns: what a training script calls and reads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from pollux.data.loader import elastic_loader
from pollux.errors import LoopMistake, PolluxAgentError
from pollux.goodput import BatchChoice, BatchLimits
from pollux.learning_rate.scaling import Rule, follow, rule_for
from pollux.loop.added_model import AddedModel
from pollux.loop.batches import MicroBatchContext, PlainPass, TrainingLoader, backward, whole_step
from pollux.loop.coordinator import Coordinator
from pollux.loop.notices import already_finished, announce
from pollux.loop.readings import JobReadings
from pollux.loop.same_training import check_ended
from pollux.loop.script_checks import check_beside, warn_of_unknown_parameters
from pollux.loop.slips import NESTED, NO_FUNCTION
from pollux.loop.stepper import Stepper
from pollux.loop.units import initial_batch
from pollux.ranks.control import Decision
from pollux.resize.capability import may_grow
from pollux.resize.joining import Joiner
from pollux.slurm_job.attempt import Attempt
from pollux.training.trained_model import TrainedModel
from pollux.training.training import Training
from pollux.tuning import knowledge
from pollux.tuning.batch_choice import Advisor, batch_limits, choose_on_arrival, initial_choice
from pollux.tuning.knowledge import introduction
from pollux.tuning.mode import Mode


class Job(JobReadings):
    """One training, on however many GPUs it has at the moment.

    Made by `attach`.

    `training`, `stepper` and `coordinator` are the agent's own: their interfaces may change with every release.
    """

    def __init__(self, training: Training, attempt: Attempt, joiner: Joiner | None = None) -> None:
        self.training = training
        self.coordinator = Coordinator(training, attempt, joiner)
        self.open = True
        """Until `close`."""
        self._attempt = attempt
        self._stepper = Stepper(training)
        self._stepper.quiet = self.coordinator.quiet
        first = self._trained = training.models[0]
        self._plain_pass = PlainPass(self._stepper, first)
        self.module = first.module
        """The model as the user passed it."""
        self.optimizer, self.scheduler = first.optimizer, first.scheduler
        self.scaler, self.state = training.scaler, training.state
        self.coordinator.restore()
        self._wrap(first, grows=may_grow(training.world, attempt) if joiner is None else joiner.grows)
        self.model: torch.nn.Module = first.model
        """The model to train with, wrapped in DistributedDataParallel where there are other ranks and it is plain, and
        in `GrowingModel` where ranks may join the only one."""

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
    ) -> AddedModel:
        """Train a further model by this job, as a GAN's critic.

        Call it before `loader`, on all ranks alike.

        The agent saves and restores it under `name`. The model has its own noise scale and learning-rate factors. All
        models share the batches: the smallest noise scale decides the batch size and the progress of a step.
        Arguments are as for `attach`. Raises PolluxAgentError.
        """
        training = self.training
        if training.begun or not name or name in training.names:
            raise PolluxAgentError(
                f"expected a further model before the loader is made, and under a name of its own; got {name!r}"
            )
        check_beside(self.module, model, name)
        added = TrainedModel(
            model,
            optimizer,
            scheduler,
            rule_for(scaling),
            decay=self._trained.averages.decay,
            measure_every=self._trained.measure_every,
            ddp_kwargs=ddp_kwargs,
        )
        training.add(name, added)
        self.coordinator.exchange.groups += added.norms.groups
        self.coordinator.checkpointer.restore_more(added.parts(f"{name}."))
        self._wrap(added)
        return AddedModel(self._stepper, added)

    def loader(
        self,
        dataset: Dataset[Any] | Iterable[Any],
        batch_size: int,
        *,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        grow_after: int = 0,
        **options: Any,
    ) -> TrainingLoader:
        """The training data, `batch_size` (M0) examples per step over all GPUs.

        The agent may increase the batch size up to `max_batch_size` if the goodput rises. In the first `grow_after`
        epochs it keeps M0: large batches early in a training can cost accuracy.

        `per_gpu` bounds one GPU's share of a pass. By default the share begins with M0 over all GPUs, and grows while
        the GPU's memory allows it.

        Other options are those of ElasticLoader: shuffle, sampler, collate_fn, num_workers, pin_memory, drop_last,
        equal_parts (each rank has equally many samples, some of them twice, at a pass's end too; for losses over the
        samples of all ranks). For an iterable dataset they are those of ElasticStream: length (about the samples of a
        pass), transform, collate_fn, pin_memory, drop_last, equal_parts.

        Raises BatchError for sizes that contradict each other, DataError for data that cannot be divided.
        """
        training, coordinator, world = self.training, self.coordinator, self.world
        if training.begun:
            raise PolluxAgentError("expected one training loader per job; evaluate with torch's DataLoader")
        if max_batch_size is None and self._attempt.alone:
            training.adaptive = False  # the script asks only for plain training
        batch_size = initial_batch(training, batch_size, coordinator.checkpointer.last_attempt)
        limits = batch_limits(batch_size, max_batch_size, per_gpu, grow_after, adaptive=training.adaptive)
        widest = limits if per_gpu is not None else replace(limits, local_max=limits.maximum)
        most_per_gpu = training.memory.within(widest, coordinator.exchange.gather).local_max
        limits = replace(limits, local_max=min(limits.local_max, most_per_gpu))
        training.progress.initial = batch_size
        for model in training.models:
            model.meter.begin(batch_size)
        at_first = initial_choice(limits, world.nodes, world.size, adaptive=training.adaptive)
        data = elastic_loader(
            dataset,
            training.rank_share(at_first.local_batch),
            batch_size=batch_size,
            seed=self._attempt.seed,
            **options,
        )
        # A step larger than a pass would never be whole, and so never be measured. Workers read whole batches ahead.
        limited = replace(limits, maximum=min(limits.maximum, data.length), halves=data.num_workers == 0)
        training.limit(limited, most_per_gpu, grow_after)
        coordinator.tell_launcher()
        choice = coordinator.exchange.agree(
            Decision().with_choice(self._first_choice(training.limits))
        ).choice
        data.set_batch(choice.local_batch)
        coordinator.checkpointer.restore_loader(data)
        training.begin(data, choice)
        if self.is_main:
            if training.adaptive:
                self._trained.scale_to(training.batch_size / batch_size)
            announce(training, coordinator.checkpointer.last_attempt)
            training.advisor = self._start_advisor(training.limits)
            if training.adaptive:
                warn_of_unknown_parameters(training.models)
        coordinator.open(introduction(self.module, limits, training.profile))
        return TrainingLoader(self._stepper, coordinator)

    def epochs(
        self, count: float | None = None, *, steps: float | None = None, statistical: bool = False
    ) -> Iterator[int]:
        """The epochs still to train, counted from 0.

        After a restart it goes on with the epoch that was interrupted.

        An epoch is one pass through the data. With `statistical=True` it lasts until the training has made as much
        progress as one pass at batch size M0: more than one pass where batches are larger. If the number of epochs is
        not whole, the last epoch is shorter. `steps` gives the length in optimizer steps of M0 examples instead,
        counted by progress. The learning-rate schedule follows the same count. Ranks may leave and join between two
        steps: a rank that leaves ends by SystemExit in the loop over the loader.
        """
        training, coordinator, progress = self.training, self.coordinator, self.progress
        training.check_begun()
        length = training.data.length
        if (count is None) == (steps is None):
            raise PolluxAgentError(
                "expected the length of training as a number of epochs, or as steps=N alone"
            )
        count = steps * progress.initial / length if steps is not None else count
        assert count is not None
        passes = not statistical and steps is None
        training.step.managed, training.step.passes_only = True, passes
        progress.target, progress.passes = (None, count) if passes else (count * length, None)
        if training.step.in_epoch:
            raise LoopMistake(NESTED)
        coordinator.begin_loop()
        if progress.epoch >= count:
            last = coordinator.checkpointer.last_attempt
            gpus = None if last is None else last.gpus
            check_ended(training, coordinator.exchange, self._attempt.directory, gpus)
            coordinator.checkpointer.restore_random()
            if self.is_main:
                already_finished(progress, count)
        while progress.epoch < count:
            coordinator.begin_epoch()
            training.step.in_epoch = True
            try:
                yield progress.epoch
            except GeneratorExit:
                coordinator.left()
                raise
            finally:
                training.step.in_epoch = False
            if passes and progress.epoch + 1 < count:
                self._stepper.units.after_epoch()
            progress.next_epoch(length, training.data.pass_index)
        coordinator.finish()
        coordinator.resizer.close()
        self._release()

    def micro_batch(self) -> MicroBatchContext:
        """Context of one forward and backward pass. Only a step's last one synchronises the ranks."""
        if self.training.step.plain and not self._trained.meter.looks:
            return self._plain_pass
        return MicroBatchContext(self._stepper, self._trained)

    def backward(self, loss: Tensor, *, weight: float | Tensor | None = None, **options: Any) -> None:
        """Backpropagate a mean loss by the micro-batch's share of the step.

        AMP's loss scale is applied, too.

        With `weight`, `loss` is a sum, and `weight` the number of tokens it is summed over on this rank. The step's
        gradient is then the mean over the tokens of all passes and ranks, however they are divided. Give it in every
        pass, under `micro_batch`. Use a tensor where the number is on the GPU.

        `options` are those of `Tensor.backward`: retain_graph, create_graph, inputs. Raises LoopMistake.
        """
        backward(self._stepper, self._trained, loss, weight, **options)

    def step(
        self,
        loss_of: Callable[[], Tensor | None],
        *,
        clip: float | None = None,
        weight: float | Tensor | None = None,
    ) -> Tensor | None:
        """Make one pass and, when the step is complete, the optimizer step.

            for x, y in loader:
                loss = job.step(lambda: loss_fn(job.model(x), y), clip=1.0)

        `loss_of` returns the mean loss of the micro-batch, or None to leave it out as `skip` does. When the step is
        complete, the gradients are clipped to the norm `clip`, the optimizer and the scheduler step (a
        ReduceLROnPlateau does not: it wants a metric), and the gradients are zeroed. `weight` is that of `backward`.
        Return the loss without its graph; None where the pass was left out, or ran out of memory and is repeated.
        """
        if not callable(loss_of):
            raise LoopMistake(NO_FUNCTION.format(type(loss_of).__name__))
        return whole_step(self._plain_pass, loss_of, clip, weight)

    def poll(self) -> None:
        """Act on the scheduler's orders while the training makes no steps.

        Call it in a long evaluation, every few batches, on all ranks at the same point and between steps. If the order
        is to drain, the process saves and ends here, and this call does not return.
        """
        self.training.check_begun()
        self._stepper.commit_in_hand()  # a checkpoint would hold its weights
        self.coordinator.poll()

    def close(self) -> None:
        """End the agent's threads and hooks.

        The model and the optimizer stay usable. All ranks call it.

        After a `break` out of `epochs` a last checkpoint is written: a restart goes on from there.
        """
        training, coordinator = self.training, self.coordinator
        self.open = False
        coordinator.resizer.close()
        if training.begun:
            self._stepper.commit_in_hand()  # the last checkpoint holds its weights
            coordinator.stop()
        if training.advisor is not None:
            training.advisor.close()
        for model in training.models:
            model.close()
        coordinator.close()
        self._release()

    # -- what the user reads ----------------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """The report to the scheduler, as it would be now."""
        self.training.check_begun()
        return self.coordinator.report()

    # -- within -----------------------------------------------------------------------------------------------

    def _release(self) -> None:
        """Let other trainings have the folder: this one writes no more."""
        checkpointer = self.coordinator.checkpointer
        if checkpointer.restarts is not None:
            checkpointer.keep_name(over=sys.exc_info()[0] is None)
            checkpointer.restarts.holder.release()

    def _wrap(self, trained: TrainedModel, *, grows: bool = False) -> None:
        training = self.training
        follow(trained.rule, lambda: training.progress.steps)
        trained.wrap(
            training.world,
            scaler=training.scaler,
            on_ready=training.timer.ready,
            before_step=self._stepper.before_optimizer_step,
            on_step=self._on_optimizer_step,
            keeps_gradients=self._stepper.keeps_gradients,
            grows=grows,
        )
        self.coordinator.keep_restored(trained)

    def _on_optimizer_step(self) -> None:
        if self.training.begun:
            self._stepper.on_optimizer_step()
            if self.coordinator.is_left:
                self.coordinator.train_on()

    def _start_advisor(self, limits: BatchLimits) -> Advisor:
        training, last = self.training, self.coordinator.checkpointer.last_attempt
        advisor = Advisor(
            training.profile,
            limits,
            training.world.nodes,
            training.world.size,
            lambda: (training.noise_scale, training.choice),
            adaptive=training.adaptive,
            advises=training.mode is Mode.ADVISE,
            params=knowledge.usable_params(last, training.profile),
            on_first=self.coordinator.line.wake,
        )
        advisor.start()
        return advisor

    def _first_choice(self, limits: BatchLimits) -> BatchChoice:
        training, last = self.training, self.coordinator.checkpointer.last_attempt
        nodes, gpus = training.world.nodes, training.world.size
        if not training.adaptive or last is None:
            return initial_choice(limits, nodes, gpus, adaptive=training.adaptive)
        params, noise = knowledge.usable_params(last, training.profile), training.noise_scale
        return choose_on_arrival(limits, nodes, gpus, noise=noise, params=params, size=last.batch_size)
