"""The user's side of a step: the loader, and a micro-batch's context."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from threading import get_ident
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from pollux.errors import LoopMistake, RankLost
from pollux.loop import slips, summed_losses
from pollux.loop.coordinator import Coordinator
from pollux.loop.stepper import Stepper
from pollux.ranks.control import lost_peer
from pollux.ranks.sharding import synchronise
from pollux.ranks.torch_internals import expect_backward, nodes
from pollux.training.kept_gradients import Change
from pollux.training.trained_model import TrainedModel

logger = logging.getLogger("pollux")

GATHERING = re.compile("AllGather|GatherLayer")
"""Nodes of the graph of a loss that gathers features: torch's, and those of the usual scripts."""


class TrainingLoader:
    """What `job.loader` returns: iterate over it once per epoch. `data` is the loader beneath."""

    def __init__(self, stepper: Stepper, coordinator: Coordinator) -> None:
        self.data = stepper.training.data
        self._stepper, self._coordinator = stepper, coordinator

    def __len__(self) -> int:
        """Micro-batches in a whole pass at the present batch size."""
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        stepper, coordinator, data = self._stepper, self._coordinator, self.data
        step = stepper.training.step
        stepper.enter()
        stepper.units.begin_loop(over=stepper.epoch_done())
        coordinator.enter()
        try:
            while not stepper.epoch_done():
                stepper.begin_data()
                micro_batches = iter(data)
                while True:
                    stepper.plan()
                    try:
                        batch = next(micro_batches)
                    except StopIteration:
                        break
                    stepper.begin_pass()
                    ended = data.last_of_pass
                    stepper.in_hand.thread = get_ident()
                    yield batch
                    stepper.end_pass()
                    if step.stepped and step.plain:
                        stepper.end_plain_step()
                        coordinator.after_plain_step()
                    elif step.stepped:
                        stepper.end_step()
                        coordinator.after_step()
                        epoch_done = stepper.epoch_done()
                        coordinator.exchange_decisions(last=epoch_done)
                        if ended or epoch_done:
                            break
                    elif stepper.skipped:
                        stepper.skip_step()
                        coordinator.exchange_decisions(last=stepper.epoch_done())
                stepper.end_data()
            stepper.in_hand.end()
        except RuntimeError as error:
            if lost_peer(error):
                raise RankLost(
                    f"another rank ended between two passes; its own output says why: {error}"
                ) from error
            raise
        finally:
            stepper.leave()


def weigh(stepper: Stepper) -> float:
    """Weight of this pass in the step's mean; multiply the mean loss by it."""
    if not stepper.training.begun:
        stepper.training.check_begun()
    group = stepper.training.step.group
    if group is not None:
        group.weighed = True
    return stepper.share


def backward(
    stepper: Stepper,
    trained: TrainedModel,
    loss: Tensor,
    weight: float | Tensor | None = None,
    **options: Any,
) -> None:
    """Backpropagate by a micro-batch's share of the step, and AMP's scale.

    `weight`: the loss is a sum over so many tokens.
    """
    step = stepper.training.step
    if step.plain and weight is None and step.tokens is None and step.group is not None:
        step.group.weighed = True
        loss.backward(**options)  # type: ignore[no-untyped-call]
        return
    summed: summed_losses.SummedLoss | None = None
    if weight is not None:
        summed = summed_losses.begin(stepper, trained, loss, weight)
    if not stepper.training.step.looped and trained.reduces:
        warn_of_gathering(stepper, loss)
    share = weigh(stepper)
    if summed is not None:
        scaled = loss * summed.factor
    else:
        if stepper.training.step.tokens is not None:
            raise LoopMistake(
                "job.backward(loss) was called without a weight in a step whose earlier passes have one. Give each "
                "pass its weight: job.backward(loss, weight=tokens)"
            )
        scaled = loss * share if share != 1.0 else loss
    scaler = stepper.training.scaler
    if scaler is not None:
        scaled = scaler.scale(scaled)
    scaled.backward(**options)  # type: ignore[no-untyped-call]
    if summed is not None:
        summed_losses.end(stepper, trained, summed)


def warn_of_gathering(stepper: Stepper, loss: Tensor) -> None:
    """In the first pass: say what a loss over the features of all ranks needs."""
    data = stepper.training.data
    if data.equal_parts or data.drop_last or stepper.training.world.rank:
        return
    if any(GATHERING.search(name) for name in nodes(loss)):
        logger.warning(slips.GATHERS)


def skip(stepper: Stepper, trained: TrainedModel) -> None:
    """Make a backward pass of gradients that are zero, whatever the loss is.

    Each parameter's gradient hooks run, as the reduction needs them. No value of a parameter or of the loss enters.
    """
    model, step = trained.model, stepper.training.step
    if trained.meter.sharded and trained.meter.distributed:
        raise LoopMistake(slips.NOT_SHARDED)
    roots = [p.reshape(-1)[:0].sum() for p in trained.module.parameters() if p.requires_grad]
    summed: summed_losses.SummedLoss | None = None
    if step.tokens is not None or step.per_example is not None:
        summed = summed_losses.begin(stepper, trained, roots[0], 0.0)
    weigh(stepper)
    if isinstance(model, DistributedDataParallel) and trained.reduces:
        expect_backward(model, roots)
    torch.autograd.backward(roots)
    if summed is not None:
        summed_losses.end(stepper, trained, summed)


class MicroBatchContext:
    """One forward and backward pass. The ranks synchronise in a step's last pass only."""

    def __init__(self, stepper: Stepper, trained: TrainedModel) -> None:
        self.trained = trained
        self.stepper = stepper
        self._unsynchronised: Any = None

    def __enter__(self) -> None:
        stepper, trained, step = self.stepper, self.trained, self.stepper.training.step
        if not stepper.training.begun:
            stepper.training.check_begun()
        stepper.in_hand.check()
        self._sharded = trained.meter.sharded
        step.accumulates = True
        step.entered += 1
        first = step.group is None or step.group.begun < 2
        if first:
            stepper.begin_model(trained)
        else:
            self._check_kept()
        trained.in_pass = True
        self._model, self._meter = trained.model, trained.meter
        synchronises = stepper.synchronises
        if self._sharded:
            # One rank has nothing to communicate: it accumulates in its shards, where no second copy is needed.
            self._reduce(synchronises or not self._meter.distributed)
        elif (
            not synchronises
            and isinstance(self._model, DistributedDataParallel)
            # A static graph knows no `no_sync`: synchronised each time, the passes give the same sum.
            and not self._model.static_graph
        ):
            self._unsynchronised = self._model.no_sync()
            self._unsynchronised.__enter__()
        if self._meter.looks:
            self._meter.before_pass(synchronises)
        self._mark = trained.kept.mark(first=first)
        # In the first pass alone: it looks at each parameter.
        self._writes = None if step.looped else trained.writes()

    def _check_kept(self) -> None:
        """Before a further pass of a step: see that the earlier ones' gradients are there. Raises LoopMistake."""
        change, group = self.trained.kept.change(), self.stepper.training.step.group
        if change is Change.ZEROED and group is not None:
            raise LoopMistake(slips.ZEROED.format(group.begun - 1, group.passes, group.begun))
        if change is Change.OTHER:
            warnings.warn(slips.MIXED, stacklevel=3)

    def _reduce(self, reduce: bool) -> None:
        if self._meter.reduces is not reduce:  # it walks through all modules
            synchronise(self._model, reduce)
            self._meter.reduces = reduce

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        stepper, synchronises = self.stepper, self.stepper.synchronises
        self.trained.in_pass = False
        if self._unsynchronised is not None:
            self._unsynchronised.__exit__(kind, error, trace)
        if self._sharded and not synchronises:
            self._reduce(True)  # for passes outside of this context
        if error is not None:
            return self._failed(error)
        step, group = stepper.training.step, stepper.training.step.group
        if group is not None and not group.weighed:
            if self.trained.kept.same(self._mark):
                self._meter.leave_out_pass(synchronises)
                return False
            if stepper.share != 1.0:
                warnings.warn(
                    "expected job.backward(loss) in job.micro_batch(), which gives this pass its weight of "
                    f"{stepper.share:g} in the step; after loss.backward() it counts as if that were 1",
                    stacklevel=2,
                )
        if self._writes is not None and self._writes != self.trained.writes():
            logger.warning(slips.STEPS_IN_BACKWARD)
        self.trained.passed = True
        if stepper.training.timer.timing:
            stepper.training.timer.passed()
        if self._meter.looks:
            share = stepper.share
            if step.tokens is not None and group is not None:
                share = 1.0 / group.passes  # each pass counts by its tokens
            self._meter.after_pass(synchronises, share, weights=step.weights)
        if step.weights is not None:
            summed_losses.apply_weights(step.weights, self.trained)
        if not synchronises:
            self.trained.kept.note()
        return False

    def _failed(self, error: BaseException) -> bool:
        """Forget a pass that raised. Return whether its step is taken again."""
        self._meter.abandon_pass()
        training = self.stepper.training
        if training.data.uneven and isinstance(error, RuntimeError):
            own = training.data.local_samples
            logger.warning(slips.UNEVEN, own, training.world.rank, training.data.samples)
        if "Expected to have finished reduction" in str(error):
            raise LoopMistake(slips.UNUSED) from error
        if lost_peer(error):
            raise RankLost(
                "another rank ended in a pass that needs all of them; its own output says why. Every rank "
                f"has to make the same number of passes: {error}"
            ) from error
        return self.stepper.caught(error)


class PlainPass(MicroBatchContext):
    """The same in a step that is as the one before, on one rank (`Stepper.plan`); one object serves all of them."""

    def __enter__(self) -> None:
        stepper, trained = self.stepper, self.trained
        if stepper.in_hand.thread != get_ident():
            stepper.in_hand.check()
        stepper.training.step.entered += 1
        trained.in_pass = True
        self._mark = trained.kept.mark(first=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        trained, step = self.trained, self.stepper.training.step
        if error is None and step.weights is None and step.group is not None and step.group.weighed:
            trained.in_pass, trained.passed = False, True
            return False
        self._model, self._meter, self._writes, self._sharded = (
            trained.model,
            trained.meter,
            None,
            trained.meter.sharded,
        )
        return super().__exit__(kind, error, trace)


def whole_step(
    plain: PlainPass,
    loss_of: Callable[[], Tensor | None],
    clip: float | None,
    weight: float | Tensor | None,
) -> Tensor | None:
    """Make one pass, and the optimizer step after the step's last pass. See `Job.step`."""
    stepper, trained = plain.stepper, plain.trained
    loss: Tensor | None = None
    group = stepper.training.step.group
    if trained.first.grad is not None and (group is None or group.begun < 2):
        trained.optimizer.zero_grad()  # an attack on the batch, or a search for the rate, has left gradients
    short = stepper.training.step.plain and not trained.meter.looks
    with plain if short else MicroBatchContext(stepper, trained):
        loss = loss_of()
        if loss is None:
            skip(stepper, trained)
        elif not isinstance(loss, Tensor) or loss.numel() != 1:
            found = (
                f"a tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            )
            raise LoopMistake(slips.NO_LOSS.format(found))
        else:
            try:
                backward(stepper, trained, loss, weight)
            except RuntimeError as error:
                if "backward through the graph a second time" in str(error):
                    raise LoopMistake(slips.OWN_BACKWARD) from error
                raise
    if stepper.training.step.failed:
        return None
    if stepper.synchronises:
        optimizer, scaler = trained.optimizer, stepper.training.scaler
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            groups = optimizer.param_groups
            clip_grad_norm_(
                groups[0]["params"] if len(groups) == 1 else [p for group in groups for p in group["params"]],
                clip,
            )
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        trained.schedule.step()
        optimizer.zero_grad()
    return None if loss is None else loss.detach()
