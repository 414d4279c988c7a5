"""One model with its optimizer, scheduler, wrapper and noise meter.

A job has one, and one more for each call of `Job.add_model` (a GAN's critic). All train on the same batches. The model
with the smallest noise scale decides the batch size, because it gains least from a larger batch. Unlike gradients,
noise scales are comparable between models and optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from pollux.errors import PolluxAgentError
from pollux.goodput import NoiseScale
from pollux.learning_rate import averaged_direction
from pollux.learning_rate.moment_lag import MomentLag
from pollux.learning_rate.scaling import (
    RULES,
    LearningRateScaler,
    Rule,
    automatic,
    factors,
    square_root_adascale,
)
from pollux.learning_rate.schedule import ScaledSchedule
from pollux.noise.measuring import NoiseMeter
from pollux.noise.noise_scale import NoiseAverages
from pollux.noise.precondition import GradientNorms
from pollux.optimizers.families import not_understood
from pollux.optimizers.together import Together
from pollux.ranks.sharding import check_sharded, is_sharded
from pollux.ranks.torch_internals import skips_step
from pollux.ranks.world import World
from pollux.training.growing_model import GrowingModel
from pollux.training.kept_gradients import KeptGradients
from pollux.training.script_record import ScriptRecord
from pollux.tuning.measuring_cost import LEAST_INTERVAL

logger = logging.getLogger("pollux")

_REQUIRE = attrgetter("requires_grad")

CommunicationHook = tuple[object, Callable[[Any, Any], torch.futures.Future[Tensor]]]
"""State and function, as for `DistributedDataParallel.register_comm_hook`."""

BLIND = (
    "the noise scale is not measured, and the batch size stays: %s, so that a rank's own gradient is never there "
    "beside the mean of all"
)


class TrainedModel:
    """A model in training. Made in two steps: a checkpoint is restored between them."""

    meter: NoiseMeter
    rates: LearningRateScaler
    model: torch.nn.Module
    """The model to train with."""

    def __init__(
        self,
        module: torch.nn.Module,
        optimizer: Optimizer,
        scheduler: Any | None,
        rule: Rule,
        *,
        decay: float,
        measure_every: int | None = None,
        ddp_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`measure_every` None: as rank 0 decides. Raises PolluxAgentError."""
        if measure_every is not None and measure_every < 1:
            raise PolluxAgentError(f"expected to measure every so many steps, 1 or more, got {measure_every}")
        self.module, self.optimizer, self.scheduler, self.rule = module, optimizer, scheduler, rule
        self.measure_every = measure_every
        self._ddp = dict(ddp_kwargs or {})
        self.comm_hook: CommunicationHook | None = self._ddp.pop("comm_hook", None)
        """The script's own, which reduces the gradients."""
        self.norms = GradientNorms(optimizer, chosen=rule is not automatic)
        sparse = (part for part in module.modules() if getattr(part, "sparse", False) is True)
        self.norms.leave_out(p for part in sparse for p in part.parameters(recurse=False))
        self.averages = NoiseAverages(self.norms.groups, decay=decay)
        self.schedule = ScaledSchedule(scheduler)
        self.lag = MomentLag()
        self.kept = KeptGradients(optimizer)
        self.unused_looks = 8
        """Steps that are still looked at for parameters that no pass uses."""
        self.record = ScriptRecord(module, optimizer, scheduler)
        self._scale_in_hand: float | None = None
        """M / M0 of the current step; None if the learning rate does not follow it."""
        self._judged = self._lags = False
        """`_judged`: the optimizer's families are known. `_lags`: one of them has a moment that lags."""
        self.passed = False
        """The context of the present pass is over: its gradients are in `.grad`."""
        self.in_pass = False
        """The script is in the context of the present pass."""
        self.new_loop = False
        """A loop over the loader has begun: the script may have replaced parameters before."""

    def parts(self, prefix: str = "") -> dict[str, Any]:
        """Parts of a checkpoint that belong to this model, by name."""
        parts = {
            "script": self.record,  # the optimizer is restored after it
            "model": self.module,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "noise": self.averages,
            "schedule": self.schedule,
            "lag": self.lag,
        }
        return {prefix + name: part for name, part in parts.items()}

    def wrap(
        self,
        world: World,
        *,
        scaler: Any | None,
        on_ready: Callable[[], None],
        before_step: Callable[[TrainedModel, Any, Any, Any], None],
        on_step: Callable[[], None],
        keeps_gradients: Callable[[TrainedModel], bool],
        grows: bool = False,
    ) -> None:
        """Wrap the model for its ranks, after restoring, and make its meter.

        `grows`: the job began on one rank, and may get further ones in the processes.
        """
        self._main = world.rank == 0
        self.norms.count_from_state()
        self.model = self.module
        if is_sharded(self.module):
            # A joiner that waits is among the joiners alone.
            check_sharded(self.module, dist.get_world_size() if world.waiting else world.size)
            if self.comm_hook is not None or self._ddp:
                raise PolluxAgentError("expected `ddp_kwargs` for a plain model, got one under fully_shard")
        elif grows or world.distributed:
            if world.device.type == "cuda":
                self._ddp.setdefault("device_ids", [world.device])
            self.model = wrapper = GrowingModel(self.module)
            if world.distributed:
                wrapper.spread(self._ddp, send=not grows)

        def metered(world: World, sampling: int) -> NoiseMeter:
            alone = world.size < 2 and not is_sharded(self.module)
            if self.comm_hook is not None and not alone and isinstance(self.model, DistributedDataParallel):
                self.model.register_comm_hook(*self.comm_hook)
            return NoiseMeter(
                self.module if alone else self.model,
                self.norms,
                self.averages,
                device=world.device,
                scaler=scaler,
                on_ready=on_ready,
                sampling=sampling,
                least=0 if self.measure_every else LEAST_INTERVAL,
                blind=self.comm_hook is not None,
            )

        self._metered = metered
        self.meter = metered(world, self.measure_every or 1)
        if self.meter.blind and self._main:
            by_hook = self.comm_hook is not None
            logger.warning(
                BLIND,
                "a communication hook of the script's reduces the gradients"
                if by_hook
                else "gradient_as_bucket_view reduces gradients in place",
            )
        self.watch_parameters()
        self._on_step = on_step
        self._hook = self.optimizer.register_step_pre_hook(partial(before_step, self))
        self.rates = LearningRateScaler(self.optimizer, on_step=self._stepped)
        zero_grad = self.optimizer.zero_grad

        def guarded(set_to_none: bool = True) -> None:
            if not keeps_gradients(self):
                zero_grad(set_to_none)
                if self.meter.measures:
                    self.meter.zeroed()

        # On this optimizer alone, as torch's schedulers replace `step`; no hook of torch's can skip a call.
        self.optimizer.zero_grad = guarded  # type: ignore[method-assign]

    @property
    def reduces(self) -> bool:
        """A pass through the wrapped model reduces its gradients.

        The wrapper may still be there when all other ranks have left.
        """
        model = self.model
        return isinstance(model, DistributedDataParallel) and not getattr(model, "alone", False)

    def writes(self) -> int:
        """Count the writes to all parameters, to see later whether there were more. Waits for no device."""
        return sum(p._version for p in self._parameters)

    @property
    def needs_all_gradients(self) -> bool:
        """On several ranks each pass has to use all parameters that require a gradient."""
        own = self._ddp.get("find_unused_parameters") or self._ddp.get("static_graph")
        return not (own or self.meter.sharded)

    def leave_group(self) -> None:
        """Before the process groups end: wait for the meter's messages in them."""
        self.meter.discard()

    def rewrap(self, world: World) -> None:
        """Make a new wrapper inside the object that the script holds.

        Parameters and buffers are already equal on all ranks, so they are not sent again.
        """
        if isinstance(self.model, GrowingModel):
            if world.distributed:
                self.model.spread(self._ddp)
            else:
                self.model.retire()
        self.watch_parameters()
        before = self.meter
        before.close()
        self.meter = self._metered(world, before.sampling)
        self.meter.initial, self.meter.agreed = before.initial, before.agreed
        self.meter.read_every = before.read_every

    def watch_parameters(self) -> None:
        """Note the model's parameters, and which of them require gradients."""
        self._parameters = list(self.module.parameters())
        self._trainable = list(map(_REQUIRE, self._parameters))
        optimized = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.first: Tensor = next(filter(_REQUIRE, optimized), optimized[0])

    def follow_parameters(self, world: World) -> bool:
        """Wrap the model again where other parameters require gradients.

        Every rank calls it, before a step's first pass. DistributedDataParallel averages the gradients of the
        parameters that required them when it was made. Return True if it was made again.
        """
        if self.meter.sharded:
            self.new_loop = False
            return False  # fully_shard looks at each step
        now = list(self.module.parameters()) if self.new_loop else self._parameters
        trainable = list(map(_REQUIRE, now))
        same = not self.new_loop or list(map(id, now)) == list(map(id, self._parameters))
        self.new_loop = False
        if same and trainable == self._trainable:
            return False
        if not any(trainable):
            return False  # a model that is frozen as a whole has no pass of its own
        self.leave_group()
        self.rewrap(world)
        return True

    def begin_step(
        self,
        step: int,
        passes: int,
        local_batch: int,
        samples: int,
        *,
        whole: bool,
        halved: bool,
        scale: float | None,
    ) -> None:
        """Begin a step over `samples` examples. `scale`: M / M0 where the learning rate follows it."""
        self.meter.begin_group(step, passes, local_batch, samples, whole=whole, halved=halved)
        if self.schedule.steps:
            self.schedule.begin()
        self._scale_in_hand = scale
        if scale is None:
            self.rates.factors = ()
            return
        self.scale_to(scale)

    @property
    def follows_each_step(self) -> bool:
        """Something of `begin_step` differs between steps of one size."""
        factors = self._scale_in_hand is not None and (
            self._lags or not self._judged or (self.rule is not automatic and self.rule not in RULES.values())
        )
        return self.schedule.steps or factors

    def again(self) -> None:
        """Begin a step of the same size as the one before; see `follows_each_step`."""
        if self.schedule.steps:
            self.schedule.begin()
        if self._scale_in_hand is not None:
            self.scale_to(self._scale_in_hand)

    def measured(self) -> Sequence[NoiseScale | None]:
        """This rank's noise scale of each parameter group, not agreed yet. None until measured."""
        return self.averages.groups() or [None] * self.norms.groups

    def agree(self, noise: Sequence[NoiseScale | None], sampling: int, read_every: int) -> None:
        """Take over rank 0's noise scales and intervals. Keep the former noise scales where it has none."""
        self.meter.agreed = tuple(n for n in noise if n is not None) or self.meter.agreed
        self.meter.sampling, self.meter.read_every = sampling, read_every

    def scale_to(self, scale: float) -> None:
        """Set each parameter group's factor for a step of `scale` M0."""
        self.rates.factors = []
        noise: Sequence[NoiseScale | None] = self.meter.agreed or [None] * self.norms.groups
        families = self.norms.families
        if len(self.optimizer.param_groups) > len(noise):
            # Groups that the user has added since are not measured one by one.
            noise = (*noise, *[self.meter.total] * (len(self.optimizer.param_groups) - len(noise)))
        if scale > 1.0:
            self.rates.factors = factors(self.rule, families, scale, noise)
        self._correct_root(scale, noise)

    def _correct_root(self, scale: float, noise: Sequence[NoiseScale | None]) -> None:
        """Correct the square root of the gain in groups that follow it.

        The size of their steps has to have settled (`MomentLag`), and to hold the noise of single gradients
        (`averaged_direction`).
        """
        families = self.norms.families
        if not families or self.rule not in (automatic, square_root_adascale):
            return
        wanted = [1.0] * len(noise)
        for i, at in enumerate(noise):
            family = families[min(i, len(families) - 1)]
            if self.rule is square_root_adascale or family.rule == "sqrt-adascale":
                group = self.optimizer.param_groups[i]
                if family.lags:
                    wanted[i] = self.lag.correction(i, scale, at, family.clip(group))
                share = family.noise_share(group)
                if share < 1.0:
                    wanted[i] *= averaged_direction.correction(scale, at, share)
        if wanted.count(1.0) < len(wanted):
            present = self.rates.factors or [1.0] * len(wanted)
            self.rates.factors = [factor * own for factor, own in zip(present, wanted, strict=True)]

    def _judge(self) -> None:
        """Once the optimizer's families are known: see what they need, and warn where one is not understood."""
        self._judged = bool(self.norms.families)
        self._lags = any(family.lags for family in self.norms.families)
        if self._main and not self.norms.understood:
            logger.warning(not_understood(self.optimizer))

    def _stepped(self) -> None:
        """Count a step, from the optimizer's hook. AMP calls a fused optimizer even for a step that it skips."""
        if skips_step(self.optimizer):
            return
        self.norms.steps += 1
        if self._scale_in_hand is not None:
            if not self._judged:
                self._judge()
            if self._lags:
                families = enumerate(self.norms.families)
                newest = [self.norms.step_rule(i).newest if family.lags else 1.0 for i, family in families]
                self.lag.stepped(self._scale_in_hand, newest)
        self._on_step()

    def close(self) -> None:
        """End its hooks."""
        self.meter.close()
        self.rates.remove()
        self._hook.remove()
        for guarded in ("zero_grad", "add_param_group"):
            self.optimizer.__dict__.pop(guarded, None)
        if isinstance(self.optimizer, Together):
            self.optimizer.part_ways()


def least_noise(trained_models: Sequence[TrainedModel]) -> NoiseScale | None:
    """The agreed noise scale that decides the batch size: the smallest.

    None while no noise scale is known, and if the agent does not understand an optimizer. The batch size then stays.
    """
    if not all(trained_model.norms.understood for trained_model in trained_models):
        return None
    known = [total for trained_model in trained_models if (total := trained_model.meter.total) is not None]
    return min(known, key=lambda n: n.var / n.sqr if n.sqr > 0 else float("inf"), default=None)
