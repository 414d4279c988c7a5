"""Decide which steps are measured, and by which estimator.

All ranks decide alike, from numbers that are equal on all of them: the count of optimizer steps, and the sampling
interval in rank 0's decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pollux.goodput import NoiseScale
from pollux.noise.estimators import AccumulationEstimator, DifferencedEstimator
from pollux.noise.noise_scale import MIN_SAMPLES, NoiseAverages, SampleKind
from pollux.noise.precondition import GradientNorms
from pollux.noise.reduction import ReductionEstimator
from pollux.noise.samples import SampleBuffer, Squares, added, summed
from pollux.noise.uneven import StepWeights, as_equal
from pollux.ranks.sharding import is_sharded
from pollux.ranks.torch_internals import loss_scale, reduces_gradients

if TYPE_CHECKING:
    from pollux.noise.sharded_noise import ReduceScatterEstimator

    RanksEstimator = ReductionEstimator | ReduceScatterEstimator
    Estimator = RanksEstimator | AccumulationEstimator | DifferencedEstimator

ROWS = 64
"""Most samples kept until they are read."""

KNOWN = 16
"""Samples until the noise scale is known well enough to be measured rarely."""

MOST_TRIES = 48
"""Measured steps at the beginning that need not wait: gradients that give no noise scale by then may never give one."""


def interval_of(meters: Sequence[NoiseMeter], by_cost: Callable[[int], int]) -> int:
    """Return the optimizer steps from one sample to the next, on rank 0.

    1 until all models' noise scales are known; then by the cost of a sample, of so many measured steps.
    """
    return by_cost(max(meter.steps for meter in meters)) if all(meter.known for meter in meters) else 1


class NoiseMeter:
    """Measures the noise scale of one model's training."""

    def __init__(
        self,
        model: torch.nn.Module,
        norms: GradientNorms,
        averages: NoiseAverages,
        *,
        device: torch.device,
        scaler: Any | None = None,
        on_ready: Callable[[], None],
        sampling: int = 1,
        least: int = 0,
        blind: bool = False,
    ) -> None:
        """`least`: fewest steps from one measured step to the next, once the noise scale is known. Twice as many where
        a sample takes two steps, or a pass more.

        `blind`: a communication hook of the script's reduces the gradients.
        """
        self.norms = norms
        self.averages = averages
        self.sampling = sampling
        """Optimizer steps from one measured gradient to the next, as rank 0 has decided."""
        self.measures = False
        """The present step is measured."""
        self.steps = 1
        """Measured steps that a sample takes."""
        self._least, self._times = least, 1
        self._tries = 0
        self.initial = 1
        """M0; known with the loader."""
        self.read_every = 1
        """Optimizer steps between readings of samples, if the buffer holds as many."""
        self.agreed: tuple[NoiseScale, ...] = ()
        """Noise scale per parameter group, equal on every rank; empty while unknown."""
        self._scaler = scaler
        self._device = device
        self._source: Estimator | None = None
        """What measures the present step; None where nothing does."""
        self._kind: SampleKind | None = None
        self._flushed_at = 0
        self._step = 0
        self._due_from = 0
        self.sharded = is_sharded(model)
        """The model is under fully_shard."""
        self.reduces = True
        """Whether its next backward passes reduce their gradients."""
        self.hooked = isinstance(model, DistributedDataParallel) and not model.gradient_as_bucket_view
        """The estimator sees reduced gradients apart from `.grad`, which the user's loop may change before the step."""
        self._static = isinstance(model, DistributedDataParallel) and model.static_graph
        self._young = self._static
        """No pass of a static graph is over: DDP reduces after the first one in another order."""
        # A reduction in place begins before the pass is over, and a hook's result need not be a mean.
        self.blind = isinstance(model, DistributedDataParallel) and (blind or model.gradient_as_bucket_view)
        """The ranks' own gradients cannot be seen: nothing is measured."""
        params = [p for p in model.parameters() if p.requires_grad]
        self._hook: RanksEstimator | None = None
        self._reduction: ReductionEstimator | None = None
        group = self._see_ranks(model, params, on_ready)
        self.looks = self._hook is not None
        """The passes of the present step are looked at: it is measured, or ranks reduce its gradients."""
        # Gradients of another optimizer are not set aside: that optimizer's estimator may do so.
        own = [p for p in params if p in norms.group_of]
        self._accumulation = AccumulationEstimator(norms, own)
        self._differenced = DifferencedEstimator(norms, own)
        parts = (False, False) if self._hook is None else self._hook.parts
        self._buffer = SampleBuffer(norms.groups, device, rows=ROWS, group=group, parts=parts)

    def _see_ranks(
        self, model: torch.nn.Module, params: list[torch.nn.Parameter], on_ready: Callable[[], None]
    ) -> dist.ProcessGroup | None:
        """Make what compares the gradients of several ranks. Return the group of these ranks; None for one rank."""
        if isinstance(model, DistributedDataParallel):
            group: dist.ProcessGroup = model.process_group
            self._hook = self._reduction = ReductionEstimator(
                self.norms,
                params,
                rank=dist.get_rank(group),
                ranks=dist.get_world_size(group),
                reduces=lambda: reduces_gradients(model),
                varies=model.find_unused_parameters,
                on_ready=on_ready,
            )
            return group
        if not self.sharded or dist.get_world_size() < 2:
            return None
        from pollux.noise.sharded_noise import ReduceScatterEstimator  # noqa: PLC0415 - loads torch's sharding

        self._hook = ReduceScatterEstimator(self.norms, model, dist.get_world_size())
        return dist.group.WORLD

    def begin(self, initial: int) -> None:
        """Begin training with batches of `initial` (M0); averages continue."""
        self.initial = initial
        self.agreed = tuple(self.averages.groups() or ())

    @property
    def distributed(self) -> bool:
        return self._hook is not None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that gradients are averaged over; None: one rank alone."""
        return self._buffer.group if self.distributed else None

    @property
    def total(self) -> NoiseScale | None:
        """The agreed noise scale over all parameters; None while unknown."""
        if not self.agreed:
            return None
        return NoiseScale(sum(n.sqr for n in self.agreed), sum(n.var for n in self.agreed))

    @property
    def interval(self) -> int:
        """Optimizer steps from one measured gradient to the next."""
        return max(self.sampling, self._least * self._times if self.known else 1)

    @property
    def known(self) -> bool:
        """The noise scale is known well enough, or cannot be measured."""
        return self.averages.samples >= KNOWN or self._tries > MOST_TRIES

    def due(self, step: int) -> bool:
        """Tell whether optimizer step `step` is measured."""
        if step < self._due_from and self._differenced.kept is None:
            return False
        return self.norms.warm and not (self.blind or self._young)

    def unmeasured(self, step: int) -> int:
        """Return how many steps, from `step` on, are surely not measured."""
        if self.blind:
            return 1 << 30
        if self.measures or self._differenced.kept is not None or not self.norms.warm:
            return 0
        return max(self._due_from - step, 0)

    def begin_group(
        self,
        step: int,
        passes: int,
        local_batch: int,
        batch_size: int,
        *,
        whole: bool,
        halved: bool = False,
    ) -> None:
        """Begin a step.

        `whole`: no end of a pass through the data cuts it short. `halved`: it would have had one pass.
        """
        self._source, self._step, self.measures = None, step, False
        self.looks = self._hook is not None
        if not whole:
            self._differenced.forget()
            return
        if not self.due(step) or (self._static and passes > 1):
            return  # a static graph synchronises all passes: the last one does not see the ranks' own gradients
        self.measures = self.looks = True
        self.steps, self._times = 1, 1 + halved
        self._tries += 1
        scale = batch_size / self.initial
        if self._hook is not None:
            size = batch_size // (local_batch * passes)
            self._source = self._hook
            self._kind = SampleKind(size, local_batch * passes, scale, self.interval)
        elif passes >= 2:
            self._source = self._accumulation
            self._kind = SampleKind(passes, local_batch, scale, self.interval)
            self._accumulation.begin_group()
            self._differenced.forget()
        else:
            self._source, self.steps, self._times = self._differenced, 2, 2
            self._kind = SampleKind(2, local_batch, scale, self.interval)

    def before_pass(self, synchronises: bool, *, first: bool = True) -> None:
        """Begin a micro-batch; `first`: no earlier pass of its step was reduced."""
        if self._hook is not None and synchronises:
            self._hook.begin(self._source is self._hook, first=first)
        if self._source is self._accumulation:
            self._accumulation.before_backward()

    def after_pass(
        self, synchronises: bool, share: float, passes: int = 1, *, weights: StepWeights | None = None
    ) -> None:
        """End a micro-batch.

        `share` is the weight of its mean loss in the step's. `passes` counts the passes in `.grad`, if the user's own
        loop has accumulated them. `weights`: losses are sums, and `.grad` is not yet multiplied by its factor.
        """
        if passes > 1 and self._source is not None and self._kind is not None:
            kind = self._kind
            self._kind = kind._replace(examples=kind.examples * passes, scale=kind.scale * passes)
        if self._source is self._accumulation:
            self._accumulation.after_backward(share)
        if not synchronises:
            return
        self._young = False
        if self._reduction is not None:
            self._reduction.passed()
        if self._source is not None:
            self._end_group(weights)

    def zeroed(self) -> None:
        """The script has zeroed the gradients."""
        self._accumulation.zeroed()

    def abandon_pass(self) -> None:
        """Restore the gradients after a pass that raised."""
        if self._reduction is not None:
            self._reduction.abandon()
        if self._source is self._accumulation:
            self._accumulation.abandon()
        self._source = None

    def leave_out_pass(self, synchronises: bool) -> None:
        """End a pass without a backward pass.

        The ranks measure the step unless it was its last pass: they reduce their gradients there.
        """
        if synchronises or self._source is self._accumulation:
            self.abandon_pass()

    def _end_group(self, weights: StepWeights | None) -> None:
        assert self._kind is not None
        unscale = self._unscale()
        if weights is not None:
            unscale = weights.factor if unscale is None else unscale * weights.factor
        source, self._source = self._source, None
        assert source is not None
        if isinstance(source, DifferencedEstimator):
            pair = source.end(unscale)
            unscale = weights = None  # both gradients have their own factors already
        else:
            pair = source.end()
            if self._hook is not None and self._hook.reductions > 1:
                # The user's own accumulation without `no_sync`: `.grad` held means already.
                pair = None
        if pair is not None or self._differenced.kept is not None or self._tries > MOST_TRIES:
            self._measured()
        if pair is None:
            return
        local, total = pair
        if unscale is not None:
            local, total = (added(self._sum_of(found) * unscale**2) for found in pair)
        if weights is not None:
            local, total = as_equal(
                self._sum_of(local),
                self._sum_of(total),
                weights,
                self._kind.gradients,
                parts=self._buffer.parts,
            )
        self._buffer.add(self._kind, local, total)

    def _sum_of(self, found: Squares) -> Tensor:
        return summed([found], self.norms.groups, self._device)[0]

    def _measured(self) -> None:
        """Wait an interval from here: models that step seldom are measured, too."""
        self._due_from = self._step + self.interval

    def _unscale(self) -> Tensor | None:
        """Return AMP's inverse loss scale as a tensor on the device. Reading it does not wait for the device."""
        if self._scaler is None or not self._scaler.is_enabled():
            return None
        scale = loss_scale(self._scaler)
        return None if scale is None else scale.reciprocal()

    def end_step(self, step: int) -> None:
        """End an optimizer step: take read samples in, start reading new ones."""
        buffer = self._buffer
        if buffer.arriving:
            buffer.collect(self.averages, self.initial)
        if not buffer.kinds:
            return
        if (
            step - self._flushed_at >= self.read_every
            or len(buffer.kinds) >= ROWS
            or self.averages.samples < MIN_SAMPLES
        ):
            buffer.flush()
            self._flushed_at = step

    def reset_batch(self) -> None:
        """Forget the last gradient: it had another batch size."""
        self._differenced.forget()

    def discard(self) -> None:
        """Wait for communication between the ranks; discard its result."""
        self._buffer.discard()

    def close(self) -> None:
        """End its hooks; it waits for no other rank."""
        self._buffer.clear()
        if self._reduction is not None:
            self._reduction.close()
