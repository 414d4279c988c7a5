"""The state of one training on this rank.

This object holds the whole state. `Stepper` takes the steps, `Checkpointer` saves and restores, and `Coordinator` lets
all ranks act on rank 0's decisions. All three work on this object, and keep no copies of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from pollux.data.place import ElasticData, RankShare
from pollux.errors import PolluxAgentError
from pollux.goodput import BatchChoice, BatchLimits, NoiseScale, ThroughputParams, gain
from pollux.learning_rate.moving_average import OwnAverage, follow_gain
from pollux.learning_rate.progress import Progress
from pollux.ranks.world import World
from pollux.training.memory import MemoryBounds
from pollux.training.script_state import ScriptState
from pollux.training.step import StepState
from pollux.training.trained_model import TrainedModel, least_noise
from pollux.tuning.batch_choice import Advisor, choose_on_arrival, initial_choice
from pollux.tuning.knowledge import LastAttempt
from pollux.tuning.mode import Mode
from pollux.tuning.pass_timer import PassTimer, clock_of
from pollux.tuning.profile import StepProfile


class Training:
    """Models, data, place and batch size of one training on its ranks."""

    data: ElasticData
    """The loader; set by `begin`, like `limits` and `choice`."""
    limits: BatchLimits
    """The batch sizes that the agent may choose now. They allow M0 alone until `grow_after` epochs are over."""
    most: int
    """M_max: the largest batch size that the agent may ever choose."""
    grow_after: int
    """Epochs in which the batch size stays M0."""
    most_per_gpu: int
    """The most examples of one GPU in a pass: the user's bound, or M_max. `limits` reach it by doubling (`widen`)."""
    choice: BatchChoice
    """The batch size in use."""

    def __init__(
        self,
        world: World,
        first: TrainedModel,
        profile: StepProfile,
        memory: MemoryBounds,
        *,
        mode: Mode,
        adaptive: bool,
        scaler: Any | None = None,
        state: Any | None = None,
    ) -> None:
        """`scaler` is AMP's, `state` the script's own."""
        self.world = world
        self.models = [first]
        """The first model, and those of `Job.add_model`."""
        self.names = [""]
        """Of the models; the first has none."""
        self.profile, self.memory = profile, memory
        self.mode, self.adaptive = mode, adaptive
        self.scaler, self.state = scaler, state
        self.progress = Progress(initial=1)
        self.timer = PassTimer(profile, clock_of(world.device))
        self.step = StepState()
        self.advisor: Advisor | None = None
        """Looks for a better batch size; only on rank 0."""
        self.begun = False
        """The loader is there."""
        self.on_ranks: Callable[[], None] | None = None
        """Called after the ranks have changed in the processes, for a library that stores their number."""
        self.followed: list[Any] = []
        """Samplers that the library makes again for other ranks."""
        self.ends_epochs = False
        """The library's loop can begin between an epoch's last step and the work after it (evaluation, logging)."""
        self.own_average: OwnAverage | None = OwnAverage()
        """Of the first model; None where the script asks for the gain, or once it was looked for."""
        self.tied = ""
        """Why the training goes on at its present number of ranks alone; empty where it can at any."""
        self.last_step_at = 0.0
        """When the newest optimizer step ended; POSIX seconds, 0 before the first."""

    def add(self, name: str, model: TrainedModel) -> None:
        """Train a further model."""
        self.models.append(model)
        self.names.append(name)

    def limit(self, limits: BatchLimits, most_per_gpu: int, grow_after: int) -> None:
        """Set the batch sizes that the agent may choose."""
        self.limits, self.most = replace(limits, maximum=limits.initial), limits.maximum
        self.most_per_gpu, self.grow_after = most_per_gpu, grow_after
        self.begin_epoch()

    def begin(self, data: ElasticData, choice: BatchChoice) -> None:
        """The loader is made: training may begin."""
        self.data, self.choice, self.begun = data, choice, True
        if self.adaptive:
            follow_gain(self.state, lambda: self.step.gain)
        self.widen()

    def begin_epoch(self) -> None:
        """Let the batch grow beyond M0 from the epoch `grow_after` on. All ranks do so at the same epoch's start."""
        if self.limits.maximum < self.most and self.progress.epoch >= self.grow_after:
            self.limits = replace(self.limits, maximum=self.most)
            if self.advisor is not None:
                self.advisor.limits = self.limits

    def widen(self) -> None:
        """Let a pass hold twice the examples per GPU that are in use, up to `most_per_gpu`.

        The batch in use fits into the memory of each GPU. All ranks widen their limits at the same step.
        """
        most = min(2 * self.choice.local_batch, self.most_per_gpu)
        if self.adaptive and most > self.limits.local_max:
            self.limits = replace(self.limits, local_max=most)
        if self.advisor is not None:
            self.advisor.limits = self.limits

    def check_begun(self) -> None:
        """Raise PolluxAgentError before the loader is made."""
        if not self.begun:
            raise PolluxAgentError("make the loader before the loop: job.loader(dataset, batch_size=...)")

    # -- readings ---------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """M: examples per optimizer step, over all GPUs."""
        return self.choice.size(self.world.size)

    def rank_share(self, local_batch: int) -> RankShare:
        """This rank's share of each micro-batch."""
        return RankShare(self.world.rank, self.world.size, local_batch)

    @property
    def noise_scale(self) -> NoiseScale | None:
        """The agreed gradient noise scale; None until measured. Of several models, the least."""
        return least_noise(self.models)

    @property
    def params(self) -> ThroughputParams | None:
        """The fitted throughput model. None before the first fit, and on ranks other than 0."""
        return None if self.advisor is None else self.advisor.params

    @property
    def explored(self) -> tuple[int, int]:
        """Most GPUs and most nodes that `params` was fitted to, or an earlier fit."""
        return self.profile.explored if self.advisor is None else self.advisor.explored

    def efficiency(self, samples: int) -> float:
        """Progress per example of a step over `samples` examples: 1 up to M0."""
        scale = samples / self.limits.initial
        if not self.adaptive or scale <= 1.0:
            return 1.0
        return min(float(gain(self.noise_scale, 1.0, scale)) / scale, 1.0)

    def choice_on(self, nodes: int, gpus: int) -> BatchChoice:
        """The batch size to begin with on a new placement."""
        if not self.adaptive:
            return initial_choice(self.limits, nodes, gpus, adaptive=False)
        return choose_on_arrival(
            self.limits, nodes, gpus, noise=self.noise_scale, params=self.params, size=self.batch_size
        )

    # -- parts of a checkpoint --------------------------------------------------------------------------------

    def parts(self) -> dict[str, Any]:
        """Everything with `state_dict` that a checkpoint holds, by name."""
        parts: dict[str, Any] = self.models[0].parts() | {
            "scaler": self.scaler,
            "user": self.script_part,
            "progress": self.progress,
            "memory": self.memory,
            "profile": self.profile,
        }
        for name, model in zip(self.names[1:], self.models[1:], strict=True):
            parts |= model.parts(f"{name}.")
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def script_part(self) -> Any:
        """The script's own state as a part; None without one."""
        return ScriptState(self.state) if isinstance(self.state, dict) else self.state

    def last_attempt(self) -> LastAttempt:
        """The state of this attempt's batch-size search, for the next attempt."""
        return LastAttempt(self.batch_size, self.params)

    # -- other ranks ------------------------------------------------------------------------------------------

    def agreed(self) -> dict[str, Any]:
        """Values that the ranks agreed on and no checkpoint holds, for joiners."""
        return {
            "meters": [
                (m.meter.agreed, m.meter.sampling, m.meter.read_every, m.norms.steps) for m in self.models
            ],
            "limits": (self.limits, self.most_per_gpu),
            "adaptive": self.adaptive,
            "loop": (self.step.looped, self.step.accumulates),
        }

    def agree(self, values: Mapping[str, Any]) -> None:
        """On a joining rank: take over the values of rank 0's `agreed`."""
        for model, (agreed, sampling, read_every, steps) in zip(self.models, values["meters"], strict=True):
            meter = model.meter
            meter.agreed, meter.sampling, meter.read_every = agreed, sampling, read_every
            model.norms.steps = steps
            # The script may make M0 of the number of ranks, which is another one here.
            meter.initial = values["limits"][0].initial
        self.limits, self.most_per_gpu = values["limits"]
        # The environment of a companion job lacks them. A joiner with another learning rate would train another model.
        self.adaptive = values["adaptive"]
        self.step.looped, self.step.accumulates = values["loop"]

    def leave_groups(self) -> None:
        """Before the process groups end: wait for all work in them."""
        for model in self.models:
            model.leave_group()
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the work that is queued on this rank's GPU. The end of process groups would lose theirs."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def enter_groups(self, world: World, choice: BatchChoice) -> None:
        """Go on among the ranks of `world`. Every rank of it does so after the same step."""
        self.world, self.choice = world, choice
        for model in self.models:
            model.rewrap(world)
        self.step.change_ranks()
        self.data.resize(self.rank_share(choice.local_batch))
        if self.advisor is not None:
            self.advisor.moved(world.nodes, world.size)
        self.timer.cool()
        self.pause()
        if self.on_ranks is not None:
            self.on_ranks()

    def pause(self) -> None:
        """Time passes that no step takes."""
        self.timer.pause()
        self.step.ended_at = None
