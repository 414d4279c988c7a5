"""The training's share of a job's report: the payload of `publish_v1`. Numbers are finite, or null."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Any

from pollux.training.training import Training
from pollux.tuning.measurements import Configuration


def report_of(training: Training) -> dict[str, Any]:
    """The present report of a training. Called off the main thread: it reads plain attributes only."""
    progress, limits, world, data = training.progress, training.limits, training.world, training.data
    noise, profile, choice = training.noise_scale, training.profile, training.choice
    prior, (measured_gpus, measured_nodes) = profile.prior, profile.measured()
    # Read before the fit: the report must not have a measured size together with an older fit.
    explored_gpus, explored_nodes = training.explored
    # Before the first fit of its own, the fit of earlier runs.
    params = training.params or (None if prior is None else prior.params)
    throughput = _throughput(training)
    # Not the gain of the last step: this may have been a short step at the end of a pass.
    worth = training.efficiency(training.batch_size)
    factors = training.models[0].rates.factors
    return {
        "v": 1,
        "at": time.time(),
        "params": None
        if params is None
        else _finite({k: v for k, v in params._asdict().items() if v is not None}),
        "noise": None if noise is None else _finite(noise._asdict()),
        # A fixed batch size is the only one that the scheduler may assume, even if directives allow others.
        "limits": asdict(limits) | ({} if training.adaptive else {"maximum": limits.initial}),
        "explored_gpus": explored_gpus,
        "explored_nodes": explored_nodes,
        "gpu_type": profile.gpu_type,
        "measured_gpus": measured_gpus,
        "measured_nodes": measured_nodes,
        "prior_gpus": 0 if prior is None else prior.gpus,
        "prior_nodes": 0 if prior is None else prior.nodes,
        "prior_refuted": profile.prior_refuted,
        "data_wait": training.timer.data_wait,
        "gpus": world.size,
        "nodes": world.nodes,
        "batch_size": training.batch_size,
        "local_batch": choice.local_batch,
        "accumulation": choice.accumulation,
        "goodput": throughput * worth,
        "throughput": throughput,
        "progress": progress.steps,
        "target": progress.target_steps(data.length, data.pass_index, data.position, worth),
        "epoch": progress.examples / data.length,
        "lr_factor": factors[0] if factors else 1.0,
        "gain": training.step.gain,
        "optimizer_steps": progress.optimizer_steps,
        "mode": training.mode.value,
        "advice": _advice(training),
        # Left out where no type has a bound: polluxd of an older release refuses it.
        **({"local_max_by_type": by_type} if (by_type := training.memory.by_type(limits)) else {}),
    }


def _advice(training: Training) -> dict[str, float] | None:
    """Return the batch size and passes that mode `advise` recommends.

    None if the training already has it, and in other modes.
    """
    advice = None if training.advisor is None else training.advisor.advice
    if advice is None or not math.isfinite(advice.goodput):
        return None
    return {
        "batch_size": advice.batch_size,
        "local_batch": advice.choice.local_batch,
        "accumulation": advice.choice.accumulation,
        "goodput_ratio": advice.goodput,
    }


def _throughput(training: Training) -> float:
    """Examples per second at the present batch size, from the profile.

    0 before it was measured. One GPU may make its steps in two halves (`Stepper._splits`), all of them until the noise
    scale is known: where the whole batch was never timed, the halves count.
    """
    world, choice = training.world, training.choice
    seconds = _step_time(training, choice.local_batch, choice.accumulation)
    if seconds is None and world.size == 1 and choice.accumulation == 0:
        seconds = _step_time(training, choice.local_batch // 2, 1)
    return training.batch_size / seconds if seconds else 0.0


def _step_time(training: Training, local_batch: int, accumulation: int) -> float | None:
    """Seconds of a step of so many passes; None before they were measured."""
    world, profile = training.world, training.profile
    key = Configuration(world.nodes, world.size, local_batch, world.racks)
    local, final = profile.medians(key)
    if final is None and world.size == 1:
        final = local
    if final is None or (accumulation and local is None):
        return None
    return final + accumulation * (local or 0.0)


def _finite(values: dict[str, float]) -> dict[str, float] | None:
    return values if all(math.isfinite(v) for v in values.values()) else None
