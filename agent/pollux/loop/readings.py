"""What a training script reads off its job: sizes, factors, the noise scale."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from pollux.loop.stepper import Stepper
from pollux.loop.trained_model import TrainedModel, least_noise
from pollux.ranks.world import World
from pollux.tuning.pass_timer import PassTimer


class Readings(ABC):
    """The part of `Job` that only tells."""

    world: World
    _first: TrainedModel
    _timer: PassTimer

    @property
    @abstractmethod
    def stepper(self) -> Stepper: ...

    @abstractmethod
    def _trainees(self) -> list[TrainedModel]: ...

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
        return self.stepper.choice.local_batch

    @property
    def accumulation(self) -> int:
        """s: passes without synchronisation before the synchronising one."""
        return self.stepper.choice.accumulation

    @property
    def batch_size(self) -> int:
        """M: examples per optimizer step, over all GPUs."""
        return self.stepper.batch_size

    @property
    def gain(self) -> float:
        """Steps of M0 examples that the last step was worth."""
        return self.stepper.gain

    @property
    def lr_factors(self) -> tuple[float, ...]:
        """The factor on each parameter group's learning rate; empty where there is none."""
        return tuple(self._first.rates.factors)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The gradient noise scale as all ranks know it, of several models the least; None until measured."""
        return least_noise(self._trainees())

    @property
    def params(self) -> ThroughputParams | None:
        """The fitted throughput model; None before the first fit, and on ranks other than 0."""
        advisor = self.stepper.advisor
        return advisor.params if advisor is not None else None

    @property
    def limits(self) -> BatchLimits:
        """The batch sizes that the user allows."""
        return self.stepper.limits

    @property
    def dataset_length(self) -> int:
        """|D|: examples in a pass."""
        return self.stepper.data.length

    @property
    def sync_gradients(self) -> bool:
        """True from the last micro-batch of a step on: clip, step and zero the gradients then."""
        return self.stepper.synchronises
