"""A further model of a job: a GAN's critic beside its generator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pollux.goodput import NoiseScale
from pollux.loop.batches import MicroBatchContext, backward, skip
from pollux.loop.stepper import Stepper
from pollux.training.trained_model import TrainedModel


class JobModel:
    """One model of a job: its passes, and what a script reads of it."""

    _stepper: Stepper
    _trained: TrainedModel

    def micro_batch(self) -> MicroBatchContext:
        """Context of one forward and backward pass. Only a step's last one synchronises the ranks."""
        return MicroBatchContext(self._stepper, self._trained)

    def skip(self) -> None:
        """Leave out the micro-batch of the present pass, on this rank.

            with job.micro_batch():
                loss = loss_fn(job.model(x), y)
                job.backward(loss) if loss.isfinite() else job.skip()

        Call it instead of `backward`: the other ranks wait for this rank's part of the gradient, which is zero. The
        samples count as used, with a loss of 0. Raises LoopMistake for a model under `fully_shard`.
        """
        skip(self._stepper, self._trained)

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor on each parameter group's learning rate. Empty where there is none."""
        return tuple(self._trained.rates.factors)

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Learning rate of each parameter group in the newest (or first) step: the schedule times `lr_factors`."""
        return self._trained.rates.rates()


class AddedModel(JobModel):
    """A further model of a job. Made by `Job.add_model`.

    Loop over the job's loader, and give each model's passes a context of their own:

        with critic.micro_batch():
            critic.backward(critic_loss(critic.model(real), critic.model(fake.detach())))
        with job.micro_batch():
            job.backward(generator_loss(critic.module(fake)))
        if job.sync_gradients:
            critic.optimizer.step()
            job.optimizer.step()
            ...

    A pass through another model, such as the generator's through the critic, goes by `module`: the ranks do not
    synchronise it. A step of any of the optimizers ends the job's step.
    """

    def __init__(self, stepper: Stepper, trained: TrainedModel) -> None:
        self._stepper, self._trained = stepper, trained

    @property
    def model(self) -> torch.nn.Module:
        """The model to train with, wrapped as the job's is."""
        return self._trained.model

    @property
    def module(self) -> torch.nn.Module:
        """The model as the user passed it."""
        return self._trained.module

    @property
    def optimizer(self) -> Optimizer:
        return self._trained.optimizer

    @property
    def noise_scale(self) -> NoiseScale | None:
        """This model's own gradient noise scale as all ranks know it. None until measured."""
        return self._trained.meter.total

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Backpropagate by this micro-batch's share, and AMP's loss scale."""
        backward(self._stepper, self._trained, loss, **options)
