"""Hugging Face Trainer with an elastic batch size.

    from pollux.integrations.huggingface import ElasticTrainer

    trainer = ElasticTrainer(model=model, args=args, train_dataset=data, max_batch_size=4096, per_gpu=(4, 64))
    trainer.train()

One batch of Trainer is one optimizer step: Trainer sees the step's first micro-batch, and `training_step` fetches and
accumulates the other ones. So the agent can change the batch size and the accumulation in the middle of an epoch.
Clipping, logging, callbacks and the schedule run unchanged, once per step. Trainer's lengths (`num_train_epochs`,
`max_steps`, the schedule's) count steps of the initial batch size. By default this is per_device_train_batch_size times
gradient_accumulation_steps.

A restart resumes from the agent's checkpoints, which also hold Trainer's state, at any number of GPUs. Trainer writes
its own checkpoints as its arguments say; the agent does not read them. Losses of language models are means over all
tokens of a step, as plain Trainer's are. There are two differences. The train dataset must be indexed. DeepSpeed,
DataParallel and Trainer's own FSDP are refused; pass a model under `fully_shard` (FSDP2) instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from pollux.checkpoint.checkpoint_store import CheckpointStore
from pollux.errors import PolluxAgentError
from pollux.integrations.accelerate import ddp_arguments, follow
from pollux.integrations.trainer_state import TrainerState
from pollux.integrations.trial import Trial
from pollux.loop.batches import weigh
from pollux.loop.session import Job, attach
from pollux.ranks.sharding import under_fully_shard
from pollux.slurm_job.attempt import next_directory

try:
    from transformers import Trainer, TrainerCallback
except ImportError as missing:
    raise PolluxAgentError(
        "transformers is not installed here: install it, or this package's extra `huggingface`"
    ) from missing

if TYPE_CHECKING:
    from pollux.loop.batches import TrainingLoader


class _Steps:
    """Replaces Trainer's DataLoader; iterates over the elastic loader."""

    def __init__(self, dataset: Any, initial: int) -> None:
        self.dataset = dataset
        self._length = -(-len(dataset) // initial)
        self.loader: TrainingLoader | None = None
        self.micro_batches: Iterator[Any] = iter(())

    def __len__(self) -> int:
        """Steps of an epoch at the initial batch size."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        assert self.loader is not None
        self.micro_batches = iter(self.loader)
        return self.micro_batches


class _Pace(TrainerCallback):  # type: ignore[misc]
    """Keeps Trainer's epochs those of the agent, and pauses out of steps."""

    def __init__(self, trainer: ElasticMixin) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # The batch size changes, so the number of steps is not known beforehand: the epochs decide.
        state.max_steps = max(state.max_steps, state.global_step + 2)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        job = self._trainer.job
        state.epoch = job.progress.examples / job.dataset_length

    def _pause(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._trainer.job.training.timer.pause()

    on_save = _pause

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._trainer.is_in_train:
            self._pause(args, state, control)


class TrialCallback(TrainerCallback):  # type: ignore[misc]
    """Reports a metric of each evaluation, such as `eval_accuracy`, to a trial of `pollux.trial`."""

    def __init__(self, trial: Trial, metric: str = "eval_loss") -> None:
        self._trial, self._metric = trial, metric

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        self._trial.report_metric(metrics or {}, self._metric)


_AnyTrainer: Any = object
"""For the type checker: the classes that the mixin is for are Trainers."""


class ElasticMixin(_AnyTrainer):  # type: ignore[misc]
    """Makes a Trainer elastic: `class Mine(ElasticMixin, Seq2SeqTrainer)`.

    `batch_size` is M0, over all GPUs; `max_batch_size`, `per_gpu` and `grow_after` bound what the agent may choose, as
    in `Job.loader`. `attach` holds further arguments of `pollux.attach` (scaling, seed, checkpoint_dir, ...).
    """

    control: Any

    def __init__(
        self,
        *args: Any,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        grow_after: int = 0,
        attach: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        own = self.args.per_device_train_batch_size
        self.initial_batch = batch_size or own * self.args.gradient_accumulation_steps
        per_gpu = per_gpu or (1, max(own, 1))
        self._bounds: Any = {"max_batch_size": max_batch_size, "per_gpu": per_gpu, "grow_after": grow_after}
        self._attach = dict(attach or {})
        self._job: Job | None = None
        self._steps: _Steps | None = None
        self._epochs: Iterator[int] = iter(())
        self._tokens: Any = None
        """Tokens with a label in the present pass; None where the loss is a mean over examples."""
        self._over = False
        self._begun = False
        """The agent's next epoch has begun before Trainer's."""
        # One of its batches is one whole step.
        self.args.gradient_accumulation_steps = 1
        self.accelerator.gradient_accumulation_steps = 1
        # The agent adds up the tokens. Trainer would also multiply losses by the number of ranks, an evaluation's too.
        self.args.average_tokens_across_devices = False
        self.add_callback(_Pace(self))

    @property
    def job(self) -> Job:
        """The agent's job; raises PolluxAgentError before `train` has begun."""
        if self._job is None:
            raise PolluxAgentError("expected training to have begun: the job is made by train()")
        return self._job

    # -- what Trainer calls -----------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's. Resuming goes by the agent's checkpoints; raises PolluxAgentError where there is none."""
        if resume_from_checkpoint:
            directory = next_directory(self._attach.get("checkpoint_dir"), self._attach.get("name"))
            if directory is None or not CheckpointStore(directory).paths():
                raise PolluxAgentError(
                    f"expected to resume from the agent's own checkpoints, and there is none; Trainer's "
                    f"({resume_from_checkpoint!r}) are not read: load the weights into the model instead"
                )
        return super().train(None, *args, **kwargs)

    def get_train_dataloader(self) -> Any:
        """The elastic loader's steps."""
        dataset = self.train_dataset
        if dataset is None or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise PolluxAgentError(
                f"expected a train_dataset with len() and indexing, got {type(dataset).__name__}"
            )
        self._steps = _Steps(dataset, self.initial_batch)
        return self._steps

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any
    ) -> tuple[Any, Any]:
        accelerator = self.accelerator
        # The agent wraps the model in DistributedDataParallel itself, after restoring.
        plain = functools.partial(type(accelerator).prepare_model, accelerator, evaluation_mode=True)
        accelerator.prepare_model = plain
        try:
            super()._prepare_for_training(max_steps, train_dataloader, None)
        finally:
            del accelerator.prepare_model
        options: dict[str, Any] = {"seed": self.args.data_seed or self.args.seed, **self._attach}
        optimizer: Any = getattr(self.optimizer, "optimizer", self.optimizer)
        job = attach(
            self.model,
            optimizer,
            self.lr_scheduler,
            scaler=accelerator.scaler,
            state=TrainerState(self),
            **options
            | {"ddp_kwargs": ddp_arguments(accelerator, self.model) | options.get("ddp_kwargs", {})},
        )
        self._job, self._over = job, job.progress.finished
        job.training.on_ranks, job.training.ends_epochs = self._on_ranks, True
        assert self._steps is not None
        self._steps.loader = self._make_loader(job)
        length = len(self._steps)
        epochs = self.args.max_steps / length if self.args.max_steps > 0 else self.args.num_train_epochs
        self._epochs = job.epochs(epochs, statistical=True)
        self._backward: Callable[..., Any] = accelerator.backward
        accelerator.backward = self._weighted_backward
        return job.model, train_dataloader

    def _on_ranks(self) -> None:
        """Update Trainer's number of ranks, after a resize in place."""
        follow(self.job.world, self.accelerator)
        state = self.state
        state.is_world_process_zero = self.is_world_process_zero()
        state.is_local_process_zero = self.is_local_process_zero()

    def _make_loader(self, job: Job) -> TrainingLoader:
        args, dataset, collate = self.args, self.train_dataset, self.data_collator
        if hasattr(dataset, "column_names"):  # a datasets.Dataset
            dataset = self._remove_unused_columns(dataset, description="training")
        else:
            collate = self._get_collator_with_removed_columns(collate, description="training")
        return job.loader(
            dataset,
            self.initial_batch,
            **self._bounds,
            collate_fn=collate,
            num_workers=args.dataloader_num_workers,
            pin_memory=args.dataloader_pin_memory and job.device.type == "cuda",
            drop_last=args.dataloader_drop_last,
        )

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        job = self.job
        if self._over or epoch < job.progress.epoch:
            return  # trained before the restart
        if not self._begun and next(self._epochs, None) is None:
            return
        # A joiner enters the training there, and learns that the other ranks are in a later epoch.
        self._begun = epoch < job.progress.epoch
        if self._begun:
            return
        if job.stepper.epoch_done():
            # Restored at the end of an epoch: Trainer must still evaluate, save and log there.
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            tail = (
                kwargs["model"],
                kwargs["trial"],
                epoch,
                kwargs["ignore_keys_for_eval"],
                kwargs["start_time"],
            )
            self._maybe_log_save_evaluate(self._tr_loss, None, *tail)
            return
        kwargs["num_update_steps_per_epoch"] = 2**62  # get_batch_samples ends the epoch
        try:
            super()._run_epoch(epoch=epoch, **kwargs)
        finally:
            assert self._steps is not None
            self._steps.micro_batches.close()  # type: ignore[attr-defined]

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """The first micro-batch of the next step. The agent acts (drains, saves, resizes) as it fetches it."""
        try:
            return [next(epoch_iterator)], None
        except StopIteration:
            self.control.should_epoch_stop = True
            return [], None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """One optimizer step's passes. Returns its mean loss over this rank's share."""
        job, total, weight, counted = self.job, 0.0, 0.0, True
        assert self._steps is not None
        while True:
            if not counted:
                self.current_flos += float(self.floating_point_ops(inputs))
                self._track_num_input_tokens(inputs)
            loss, self._tokens = None, self._labelled_tokens(inputs)
            items = None if self._tokens is None else self._tokens.clamp(min=1)
            with job.micro_batch():
                loss = super().training_step(job.model, inputs, items)
            if loss is None:
                total = weight = 0.0  # it ran out of memory, and the step begins again
            else:
                share = job.stepper.share if self._tokens is None else self._tokens
                total, weight = total + loss * share, weight + share
                if job.sync_gradients:
                    return total if self._tokens is None else total / weight.clamp(min=1)  # type: ignore[attr-defined]
            inputs, counted = next(self._steps.micro_batches), False

    def _labelled_tokens(self, inputs: Any) -> Any:
        """The number of tokens that the loss of a pass is a mean over, by Trainer's rule.

        None where an example has one label."""
        labels = inputs.get("shift_labels", inputs.get("labels")) if isinstance(inputs, Mapping) else None
        if getattr(labels, "ndim", 0) < 2:
            return None
        return self._get_num_items_in_batch([inputs], self.args.device)

    def _weighted_backward(self, loss: Any, **kwargs: Any) -> None:
        tokens = self._tokens
        if tokens is None:
            self._backward(loss * weigh(self.job.stepper), **kwargs)
        else:
            self.job.backward(loss * tokens.clamp(min=1), weight=tokens, **kwargs)

    def _get_learning_rate(self) -> float:
        """The learning rate in use: the schedule's, times the agent's factor."""
        if self._job is None:
            return float(super()._get_learning_rate())
        return self._job.learning_rates[0]

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer's, with the agent's numbers added to those of training."""
        if self.is_in_train and self._job is not None and "loss" in logs:
            logs.update(self._job.scalars())
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's. All ranks call it for a model under `fully_shard`: rank 0 gathers the shards."""
        if not under_fully_shard(self.model):
            super().save_model(output_dir, _internal_call)
            return
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        self._save(output_dir, state_dict=state)

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        job = self.job
        if not self._over and next(self._epochs, None) is not None:
            job.coordinator.finish()  # stopped early, by a callback
        result = super()._finalize_training(*args, **kwargs)
        self.accelerator.backward = self._backward
        job.close()
        return result


class ElasticTrainer(ElasticMixin, Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, elastic."""


def _check(trainer: Any) -> None:
    for name in ("_prepare_for_training", "_run_epoch", "_finalize_training", "get_batch_samples"):
        if not hasattr(Trainer, name):
            raise PolluxAgentError(
                f"expected a Trainer with {name}, as transformers 5.23 has it; see this package's extra `huggingface`"
            )
    refused = {
        "DataParallel over several GPUs in one process (start one process per GPU: pollux run, torchrun)": (
            trainer.args.n_gpu > 1
        ),
        "FSDP": trainer.is_fsdp_enabled,
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "auto_find_batch_size (the agent halves a batch that does not fit)": trainer.args.auto_find_batch_size,
    }
    for what, used in refused.items():
        if used:
            raise PolluxAgentError(f"ElasticTrainer does not go with {what}")
