"""Lightning with an elastic batch size, as a strategy.

    from pollux.integrations.lightning import ElasticStrategy

    trainer = L.Trainer(strategy=ElasticStrategy(max_batch_size=4096, per_gpu=(4, 64)), max_epochs=90)
    trainer.fit(module, DataLoader(dataset, batch_size=64))

One batch of Lightning is one optimizer step: Lightning sees the step's first micro-batch, and the strategy's `backward`
runs the other ones. So the agent can change the batch size and the accumulation in the middle of an epoch. Clipping,
logging, callbacks and schedulers run unchanged. M0 is the train loader's batch size times accumulate_grad_batches, over
all GPUs. Lightning's number of batches counts steps of M0.

Start the script with `pollux run` or torchrun, one process per GPU (or as one process). Leave out `devices` and
`num_nodes`. A restart resumes from the agent's checkpoints, which also hold Lightning's loops and callbacks, at any
number of GPUs. `ckpt_path` is refused. Not supported: manual optimization, several optimizers, several or iterable
train loaders, and, with more than one process, a sampler of the user. With several processes Lightning shuffles every
train loader, unless Trainer(use_distributed_sampler=False) is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from pollux.errors import PolluxAgentError
from pollux.integrations.lightning_state import LoopState, go_on
from pollux.integrations.trial import Trial
from pollux.loop.batches import weigh
from pollux.loop.session import Job, attach
from pollux.ranks.world import meet
from pollux.resize.joining import Joiner

try:
    from lightning.pytorch.callbacks import Callback, LearningRateMonitor
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as missing:
    raise PolluxAgentError(
        "lightning is not installed here: install it, or this package's extra `lightning`"
    ) from missing

if TYPE_CHECKING:
    from pollux.loop.batches import MicroBatchContext, TrainingLoader


class ElasticEnvironment(TorchElasticEnvironment):  # type: ignore[misc]
    """The ranks as `pollux run` and torchrun set them; the number may vary. One where nobody has."""

    def __init__(self) -> None:
        super().__init__()
        self.joiner = Joiner.from_environment()
        """This rank on its way into the job; None in the job."""

    def world_size(self) -> int:
        return int(os.environ.get("WORLD_SIZE", "1")) if self.joiner is None else self.joiner.size

    def global_rank(self) -> int:
        return int(os.environ.get("RANK", "0")) if self.joiner is None else self.joiner.rank

    def local_rank(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """The number of GPUs is the scheduler's to choose."""


class _Batches:
    """Replaces the train DataLoader: the first micro-batch of each step."""

    def __init__(self, strategy: ElasticStrategy, source: Any, initial: int) -> None:
        self.source, self.dataset, self.initial = source, source.dataset, initial
        self._strategy = strategy
        self._length = -(-len(source.dataset) // initial)
        self.micro_batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Steps of an epoch at M0."""
        return self._length

    def __iter__(self) -> Iterator[Any]:
        # A generator: Lightning makes the first iterator before there is a job.
        loader = self._strategy.begin_epoch()
        if loader is not None:
            self.micro_batches = iter(loader)
            # Not `yield from`: Lightning drops this iterator at an epoch's end, and `end` still needs the other.
            for batch in self.micro_batches:  # noqa: UP028
                yield batch

    def end(self) -> None:
        """Let the last step of an epoch be counted. Lightning knew it for the last and asked for no further one."""
        micro_batches, self.micro_batches = self.micro_batches, None
        if micro_batches is not None and next(micro_batches, None) is not None:
            # AMP has dropped the step, so it was not the last one: the fetched samples come again.
            stepper = self._strategy.job.stepper
            stepper.retry(stepper.training.limits)
            micro_batches.close()  # type: ignore[attr-defined]


class _Numbers(Callback):  # type: ignore[misc]
    """Logs the agent's numbers; keeps validation out of the step times."""

    def __init__(self, strategy: ElasticStrategy) -> None:
        self._strategy = strategy

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            pl_module.log_dict(self._strategy.job.scalars())

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking and self._strategy.has_job:
            self._strategy.job.training.timer.pause()


class TrialMonitor(Callback):  # type: ignore[misc]
    """Reports a logged metric of each validation, such as `val_loss`, to a trial of `pollux.trial`."""

    def __init__(self, trial: Trial, metric: str) -> None:
        self._trial, self._metric = trial, metric

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._trial.report_metric(trainer.callback_metrics, self._metric)


class _Rates(Callback):  # type: ignore[misc]
    """Shows a LearningRateMonitor the learning rates in use.

    One stands before the monitor in Lightning's list and applies the agent's factors, and one behind it.
    """

    def __init__(self, act: Callable[[], None]) -> None:
        self._act = act

    def on_train_batch_start(self, *_: Any) -> None:
        self._act()

    on_train_epoch_start = on_train_batch_start


class ElasticStrategy(DDPStrategy):  # type: ignore[misc]
    """Trains through `pollux.attach`, on any number of ranks.

    `batch_size` is M0 where it is not the loader's; `max_batch_size`, `per_gpu` and `grow_after` bound what the agent
    may choose, as in `Job.loader`. `attach` holds further arguments of `pollux.attach` (scaling, seed, checkpoint_dir,
    ddp_kwargs, ...). Raises PolluxAgentError for settings that it cannot work with.
    """

    def __init__(
        self,
        *,
        batch_size: int | None = None,
        max_batch_size: int | None = None,
        per_gpu: tuple[int, int] | None = None,
        grow_after: int = 0,
        attach: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(cluster_environment=ElasticEnvironment())
        self._initial = batch_size
        self._bounds: Any = {"max_batch_size": max_batch_size, "per_gpu": per_gpu, "grow_after": grow_after}
        self._attach = dict(attach or {})
        self._job: Job | None = None
        self._batches: _Batches | None = None
        self._loader: TrainingLoader | None = None
        self._epochs: Iterator[int] = iter(())
        self._context: MicroBatchContext | None = None
        self._arguments: tuple[Any, ...] = ()
        self._accumulated = 1
        self._samplers: list[Any] = []

    @property
    def job(self) -> Job:
        """The agent's job; raises PolluxAgentError before `fit` has begun."""
        if self._job is None:
            raise PolluxAgentError("expected training to have begun: the job is made by Trainer.fit()")
        return self._job

    @property
    def has_job(self) -> bool:
        return self._job is not None

    # -- the ranks --------------------------------------------------------------------------------------------

    @property
    def root_device(self) -> torch.device:
        # `pollux run` shows each process its own GPU alone.
        devices = self.parallel_devices or [torch.device("cpu")]
        device: torch.device = devices[self.local_rank if len(devices) > 1 else 0]
        return device

    @property
    def num_processes(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def setup_distributed(self) -> None:
        """Form the process group as the agent does, which can form it again."""
        self.set_world_ranks()
        if (
            self.world_size > 1 and self.cluster_environment.joiner is None
        ):  # a joiner is alone until it joins
            self._process_group_backend = self._get_process_group_backend()
            meet(self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def configure_ddp(self) -> None:
        """Left to the agent, which restores first."""

    def _setup_model(self, model: Any) -> Any:
        return model

    # -- setting up -------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """As DDPStrategy's. Then the agent attaches to model, optimizer and scheduler, and restores."""
        if trainer.state.fn != TrainerFn.FITTING:
            # One rank alone has no group, in which DDPStrategy would send the weights.
            parent: Any = super() if dist.is_initialized() else super(DDPStrategy, self)
            parent.setup(trainer)
            return
        _check(trainer)
        self._accumulated = trainer.accumulate_grad_batches
        trainer.accumulate_grad_batches = 1  # one of its batches is one whole step
        super().setup(trainer)
        if len(self.optimizers) != 1:
            raise PolluxAgentError(f"expected one optimizer, got {len(self.optimizers)}")
        # One that is called once per step is scaled; others go by epochs, which are the same at every batch size.
        configs = self.lr_scheduler_configs
        scaled = next((c for c in configs if c.interval == "step" and c.frequency == 1), None)
        others = [c.scheduler for c in configs if c is not scaled]
        self._job = attach(
            self.lightning_module,
            getattr(self.optimizers[0], "_optimizer", self.optimizers[0]),
            None if scaled is None else scaled.scheduler,
            scaler=getattr(self.precision_plugin, "scaler", None),
            state=LoopState(trainer, others),
            **self._attach,
        )
        self.model = self._job.model
        training = self._job.training
        training.on_ranks, training.ends_epochs, training.followed = self._on_ranks, True, self._samplers
        rates = training.models[0].rates
        trainer.callbacks[:] = [
            callback
            for own in trainer.callbacks
            for callback in (
                [_Rates(rates.apply), own, _Rates(rates.restore)]
                if isinstance(own, LearningRateMonitor)
                else [own]
            )
        ]
        trainer.callbacks.append(_Numbers(self))

    def _on_ranks(self) -> None:
        """Update Lightning's ranks, after a resize in place."""
        self.cluster_environment.joiner = None
        self.set_world_ranks()
        fit_loop = self.lightning_module.trainer.fit_loop
        go_on(fit_loop)
        fit_loop.epoch_loop.val_loop._combined_loader = None  # it is divided among the former ranks

    def process_dataloader(self, dataloader: Any) -> Any:
        """The train loader's place is taken by the elastic one."""
        trainer = self.lightning_module.trainer
        self._samplers.append(getattr(dataloader, "sampler", None))
        if trainer.state.fn != TrainerFn.FITTING or not trainer.training:
            return dataloader
        dataset, size = getattr(dataloader, "dataset", None), getattr(dataloader, "batch_size", None)
        if dataset is None or not hasattr(dataset, "__len__") or not (self._initial or size):
            raise PolluxAgentError(
                "expected one train DataLoader with a batch_size, over a dataset with len() and indexing, got "
                f"{type(dataloader).__name__} over {type(dataset).__name__}"
            )
        accumulated = max(self._accumulated, trainer.accumulate_grad_batches)
        self._batches = _Batches(self, dataloader, self._initial or size * accumulated)
        return self._batches

    def on_train_start(self) -> None:
        """The loader is there by now: the job takes it over."""
        job, batches, trainer = self.job, self._batches, self.lightning_module.trainer
        assert batches is not None
        source = batches.source
        self._loader = job.loader(
            batches.dataset,
            batches.initial,
            **self._bounds,
            collate_fn=source.collate_fn,
            num_workers=source.num_workers,
            pin_memory=source.pin_memory,
            drop_last=source.drop_last,
            **_order(source.sampler),
        )
        most = trainer.max_epochs if (trainer.max_epochs or 0) > 0 else trainer.max_steps / len(batches)
        self._epochs = job.epochs(most, statistical=True)
        # The number of steps of an epoch is not known in advance: `on_train_batch_start` marks the last step.
        trainer.fit_loop.max_batches = float("inf")
        if trainer.val_check_interval == 1.0:
            trainer.val_check_batch = float("inf")
        super().on_train_start()

    def begin_epoch(self) -> TrainingLoader | None:
        """The loader for the next epoch, or the rest of one. None where training is over."""
        trainer, stepper = self.lightning_module.trainer, self.job.stepper
        assert self._batches is not None
        self._batches.end()
        # Without a length, Lightning neither stops early nor, after the first batch, fetches ahead.
        trainer.fit_loop._data_fetcher.length = None
        while next(self._epochs, None) is not None:
            if not stepper.epoch_done():  # restored at an epoch's very end
                return self._loader
        trainer.should_stop = True
        return None

    # -- one step ---------------------------------------------------------------------------------------------

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell Lightning whether this step is the epoch's last."""
        if self._last_of_epoch():
            self.lightning_module.trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = True

    def _last_of_epoch(self) -> bool:
        job = self.job
        training, progress = job.training, job.progress
        assert training.step.group is not None
        worth = training.step.group.samples * training.efficiency(training.step.group.samples)
        end = progress.epoch_from + job.dataset_length
        return progress.examples + worth >= min(end, progress.target or end) - 0.5

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the step's first micro-batch."""
        # Before the agent looks: Lightning zeroes the gradients between the forward and the backward pass.
        for parameter in self.job.module.parameters():
            parameter.grad = None
        self._arguments = args
        return self._forward(args, kwargs)

    def _forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        while True:
            self._context = self.job.micro_batch()
            self._context.__enter__()
            try:
                return super().training_step(*args, **kwargs)
            except BaseException:
                if not self._context.__exit__(*sys.exc_info()):
                    raise
            args = (self._next_batch(), *args[1:])  # it ran out of memory: the step begins again

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The first micro-batch's backward pass, and the others' both passes."""
        job, loss = self.job, closure_loss
        while True:
            assert self._context is not None
            try:
                super().backward(loss * weigh(job.stepper), optimizer, *args, **kwargs)
            except BaseException:
                if not self._context.__exit__(*sys.exc_info()):
                    raise
            else:
                self._context.__exit__(None, None, None)
                if job.sync_gradients:
                    return closure_loss
            loss = self._next_loss()

    def _next_loss(self) -> Any:
        module = self.lightning_module
        before, module._current_fx_name = module._current_fx_name, "training_step"  # where it may log
        try:
            output = self._forward((self._next_batch(), *self._arguments[1:]), {})
        finally:
            module._current_fx_name = before
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:
            raise PolluxAgentError("expected training_step to return a loss for every micro-batch, got None")
        return loss

    def _next_batch(self) -> Any:
        """The step's next micro-batch, prepared as Lightning prepares one."""
        assert self._batches is not None
        assert self._batches.micro_batches is not None
        batch = self.precision_plugin.convert_input(next(self._batches.micro_batches))
        batch = self.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self.batch_to_device(batch, dataloader_idx=0)

    # -- the end ----------------------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        """Count the last step, and write a last checkpoint."""
        super().on_train_end()
        if self._batches is None or self._loader is None:
            return
        self._batches.end()
        if next(self._epochs, None) is not None:
            self.job.coordinator.finish()  # stopped early, by a callback or a limit

    def teardown(self) -> None:
        if self._job is not None:
            self._job.close()
            self.model = self.lightning_module
        super().teardown()


def _order(sampler: Any) -> dict[str, Any]:
    """How the user orders the data, as arguments of ElasticLoader."""
    if isinstance(sampler, SequentialSampler | RandomSampler):
        return {"shuffle": isinstance(sampler, RandomSampler)}
    if type(sampler) is DistributedSampler:
        return {"shuffle": sampler.shuffle}
    if isinstance(sampler, DistributedSampler):
        raise PolluxAgentError(
            "expected Trainer(use_distributed_sampler=False) with a sampler of your own: the agent divides its order"
        )
    return {"sampler": sampler}


def _check(trainer: Any) -> None:
    module = trainer.lightning_module
    refused = {
        "manual optimization": not module.automatic_optimization,
        "ckpt_path (the agent restores its own checkpoints)": bool(trainer.ckpt_path),
        "overfit_batches and limit_train_batches": bool(trainer.overfit_batches)
        or trainer.limit_train_batches != 1.0,
    }
    for what, used in refused.items():
        if used:
            raise PolluxAgentError(f"ElasticStrategy does not go with {what}")
