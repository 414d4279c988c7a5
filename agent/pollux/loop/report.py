"""A job's report: what its agent knows, as the payload of `publish_v1` (numbers finite, or null)."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from pollux.tuning.measurements import Configuration

if TYPE_CHECKING:
    from pollux.loop.session import Job


def report_of(job: Job) -> dict[str, Any]:
    """The present report of a job. Called off the main thread: it reads plain attributes only."""
    progress, limits, world = job.progress, job.limits, job.world
    noise, profile = job.noise_scale, job.profile
    prior, (measured_gpus, measured_nodes) = profile.prior, profile.measured()
    # Before the first fit of its own, what earlier runs have left.
    params = job.params or (None if prior is None else prior.params)
    throughput = _throughput(job)
    # Not the last step's gain: that may have been the short one at a pass's end.
    worth = job.stepper.efficiency(job.batch_size)
    report: dict[str, Any] = {
        "v": 1,
        "at": time.time(),
        "params": None
        if params is None
        else _finite({k: v for k, v in params._asdict().items() if v is not None}),
        "noise": None if noise is None else _finite(noise._asdict()),
        "limits": {
            "initial": limits.initial,
            # A batch size that is not to change is all that the scheduler may count on, whatever its directives say.
            "maximum": limits.maximum if job.adaptive else limits.initial,
            "local_min": limits.local_min,
            "local_max": limits.local_max,
        },
        "explored_gpus": profile.explored_gpus,
        "explored_nodes": profile.explored_nodes,
        "gpu_type": profile.gpu_type,
        "measured_gpus": measured_gpus,
        "measured_nodes": measured_nodes,
        "prior_gpus": 0 if prior is None else prior.gpus,
        "prior_nodes": 0 if prior is None else prior.nodes,
        "prior_refuted": profile.prior_refuted,
        "data_wait": job.stepper.timer.data_wait,
        "gpus": world.size,
        "nodes": world.nodes,
        "batch_size": job.batch_size,
        "local_batch": job.local_batch,
        "accumulation": job.accumulation,
        "goodput": throughput * worth,
        "throughput": throughput,
        "progress": progress.steps,
        "target": progress.target_steps(
            job.dataset_length, job.stepper.data.pass_index, job.stepper.data.position, worth
        ),
        "epoch": progress.examples / job.dataset_length,
        "lr_factor": job.lr_factors[0] if job.lr_factors else 1.0,
        "gain": job.gain,
        "optimizer_steps": progress.optimizer_steps,
        "mode": job.mode.value,
        "advice": _advice(job),
    }
    return {**report, **job.restart_report()}


def _advice(job: Job) -> dict[str, float] | None:
    """What mode `advise` would train with; None where that is what it trains with, or in another mode."""
    advisor = job.stepper.advisor
    advice = None if advisor is None else advisor.advice
    if advice is None or not math.isfinite(advice.goodput):
        return None
    return {
        "batch_size": advice.batch_size,
        "local_batch": advice.choice.local_batch,
        "accumulation": advice.choice.accumulation,
        "goodput_ratio": advice.goodput,
    }


def _throughput(job: Job) -> float:
    """Examples per second at the present batch size, from the profile; 0 before it was measured."""
    key = Configuration(job.world.nodes, job.world.size, job.local_batch, job.world.racks)
    final, local = job.profile.final_time(key), job.profile.local_time(key)
    if final is None and job.world.size == 1:
        final = local
    if final is None or (job.accumulation and local is None):
        return 0.0
    return job.batch_size / (final + job.accumulation * (local or 0.0))


def _finite(values: dict[str, float]) -> dict[str, float] | None:
    return values if all(math.isfinite(v) for v in values.values()) else None
