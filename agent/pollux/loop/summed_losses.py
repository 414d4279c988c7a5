"""Weigh losses that are sums over tokens by the tokens of a step.

Ranks and passes hold different numbers of tokens, and the step's total is known only in its last pass. Each pass is
therefore weighted by an expected total: the total of the last step, which is equal on all ranks. During the backward
pass of the last pass, the ranks add up their tokens. `.grad` is then multiplied by expected / actual total.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from pollux.errors import LoopMistake
from pollux.loop.stepper import Stepper
from pollux.noise.uneven import StepWeights, step_weights
from pollux.ranks.sharding import local_part
from pollux.ranks.torch_internals import foreach_mul_
from pollux.training.trained_model import TrainedModel


class SummedLoss(NamedTuple):
    """One pass with a summed loss."""

    factor: Tensor
    """Of the loss, before the backward pass."""
    expected: Tensor
    """Weight of the whole step, as the last one makes likely."""
    totals: Tensor | None
    """[sum of weights, sum of their squares] of the step: in its last pass."""
    adding: Any = None
    """The addition over the ranks that is under way."""


def begin(stepper: Stepper, trained: TrainedModel, loss: Tensor, weight: float | Tensor) -> SummedLoss:
    """Take in the weight of a pass, before its backward pass.

    Raises LoopMistake where the loop's other losses are not weighted alike.
    """
    training, step = stepper.training, stepper.training.step
    group, data = step.group, training.data
    if len(training.models) > 1:
        raise LoopMistake(
            f"job.backward(loss, weight=...) was called in a job of {len(training.models)} models. Give each of them "
            "mean losses: job.backward(loss)"
        )
    if group is None or not step.accumulates or trained.passed:
        raise LoopMistake(
            "job.backward(loss, weight=...) was called outside of a micro-batch. "
            "Put it under `with job.micro_batch():`"
        )
    if group.weighed or (group.begun > 1 and step.tokens is None):
        raise LoopMistake(
            f"job.backward(loss, weight=...) was called in pass {group.begun} of {group.passes} of a step after "
            "job.backward(loss) without a weight, or twice in a pass. Add up the pass's losses, and give each pass its "
            "weight"
        )
    own = _weight(weight, loss.device)
    if data.local_samples == 0:
        own = torch.zeros_like(own)  # a stand-in
    pair = torch.stack([own, own * own])
    step.tokens = pair if step.tokens is None else step.tokens + pair
    ranks = trained.meter.group
    if step.per_example is None:
        seen = own.clone()
        if ranks is not None:
            dist.all_reduce(seen, group=ranks)
        step.per_example = torch.where(seen > 0, seen / data.samples, 1.0)
    expected = step.per_example * group.samples
    size = 1 if ranks is None else dist.get_world_size(ranks)
    factor = (size if data.local_samples else 0) / expected
    if not stepper.synchronises:
        return SummedLoss(factor, expected, None)
    if ranks is None:
        return SummedLoss(factor, expected, step.tokens)
    mine = step.tokens[0]
    totals = torch.stack([mine, mine * mine])
    return SummedLoss(factor, expected, totals, dist.all_reduce(totals, group=ranks, async_op=True))


def end(stepper: Stepper, trained: TrainedModel, loss: SummedLoss) -> None:
    """After the backward pass: the step's weights are known in its last pass."""
    step = stepper.training.step
    if loss.totals is None or step.group is None or step.per_example is None:
        return
    if loss.adding is not None:
        loss.adding.wait()
    total, squares = loss.totals.unbind()
    ranks = trained.meter.group
    count = step.group.passes if ranks is None else dist.get_world_size(ranks)
    step.weights = step_weights(total, squares, count, loss.expected)
    step.per_example = torch.where(total > 0, total / step.group.samples, step.per_example)


def apply_weights(weights: StepWeights, trained: TrainedModel) -> None:
    """Multiply the step's gradients by their factor, in its last pass."""
    grads = [local_part(p.grad) for p in trained.module.parameters() if p.grad is not None]
    dense = [g for g in grads if not g.is_sparse and g.device == weights.factor.device]
    if dense:
        foreach_mul_(dense, weights.factor)
    if len(dense) < len(grads):
        for grad in grads:
            if grad.is_sparse or grad.device != weights.factor.device:
                grad.mul_(weights.factor.to(grad.device))


def _weight(weight: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise LoopMistake(
                "expected weight to be one number, the tokens that the loss is summed over; got a tensor of shape "
                f"{tuple(weight.shape)}. Give its sum"
            )
        return weight.detach().reshape(()).to(device, torch.float32)
    if not (math.isfinite(weight) and weight >= 0):
        raise LoopMistake(
            f"expected weight to be the tokens that the loss is summed over, got {weight}. Give a finite number of 0 "
            "or more"
        )
    return torch.full((), float(weight), device=device)
