"""What a script reads of its training."""

from __future__ import annotations

import torch

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from pollux.learning_rate.progress import Progress
from pollux.loop.added_model import JobModel
from pollux.loop.report import report_of
from pollux.loop.stepper import Stepper
from pollux.ranks.world import World
from pollux.training.training import Training
from pollux.tuning.mode import Mode
from pollux.tuning.profile import StepProfile


class JobReadings(JobModel):
    """The present values of a training."""

    training: Training

    @property
    def stepper(self) -> Stepper:
        """The agent's part in the steps. Raises PolluxAgentError before `loader` was called."""
        self.training.check_begun()
        return self._stepper

    @property
    def world(self) -> World:
        """The ranks of this job, and this rank's number among them."""
        return self.training.world

    @property
    def rank(self) -> int:
        return self.world.rank

    @property
    def is_main(self) -> bool:
        """True on rank 0. Print, log and write results there."""
        return self.world.rank == 0

    @property
    def device(self) -> torch.device:
        return self.world.device

    @property
    def mode(self) -> Mode:
        """Whether the agent observes, advises or enforces."""
        return self.training.mode

    @property
    def adaptive(self) -> bool:
        """The batch size may change."""
        return self.training.adaptive

    @property
    def progress(self) -> Progress:
        """How far the training is; a step counts from `optimizer.step()` on."""
        return self.training.progress

    @property
    def profile(self) -> StepProfile:
        """Measured step times."""
        return self.training.profile

    @property
    def local_batch(self) -> int:
        """Examples per GPU and pass (m)."""
        return self.stepper.training.choice.local_batch

    @property
    def accumulation(self) -> int:
        """Passes without synchronisation before the synchronising one (s)."""
        return self.stepper.training.choice.accumulation

    @property
    def batch_size(self) -> int:
        """Examples per optimizer step, over all GPUs (M)."""
        return self.stepper.training.batch_size

    @property
    def gain(self) -> float:
        """Steps of M0 examples that the last step was worth."""
        self.training.own_average = None
        return self.training.step.gain

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The agreed gradient noise scale; of several models, the least."""
        return self.training.noise_scale

    @property
    def params(self) -> ThroughputParams | None:
        """The fitted throughput model, on rank 0; None before the first fit."""
        return self.training.params

    @property
    def limits(self) -> BatchLimits:
        """The batch sizes that the user allows."""
        return self.stepper.training.limits

    @property
    def dataset_length(self) -> int:
        """|D|: examples in a pass."""
        return self.stepper.training.data.length

    @property
    def sync_gradients(self) -> bool:
        """True from a step's last micro-batch on. Then clip, step and zero the gradients."""
        return (self._stepper if self.training.begun else self.stepper).synchronises

    def scalars(self) -> dict[str, float]:
        """The present numbers for a chart by name, as W&B's `log` takes them; unknown ones are left out.

        `pollux/progress` is in scale-invariant steps, `pollux/epoch` in statistical epochs, `pollux/noise_scale` in
        examples, `pollux/goodput` in examples per second (0 until measured). `pollux/lr/<group>` is the learning rate
        of a parameter group in the newest optimizer step, by its number or "name".
        """
        self.training.check_begun()
        report = report_of(self.training)
        values = {
            "batch_size": report["batch_size"],
            "local_batch": report["local_batch"],
            "accumulation": report["accumulation"],
            "gpus": report["gpus"],
            "gain": report["gain"],
            "progress": report["progress"],
            "epoch": report["epoch"],
            "lr_factor": report["lr_factor"],
            "goodput": report["goodput"],
            "throughput": report["throughput"],
        }
        groups = self.training.models[0].optimizer.param_groups
        for number, (group, rate) in enumerate(zip(groups, self.learning_rates, strict=False)):
            values[f"lr/{group.get('name', number)}"] = rate
        noise = self.training.noise_scale
        if noise is not None and noise.sqr > 0:
            values["noise_scale"] = noise.phi(self.training.limits.initial)
        return {f"pollux/{name}": float(value) for name, value in values.items()}
