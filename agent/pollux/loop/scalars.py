"""The numbers of a training that belong on a chart, by name."""

from __future__ import annotations

from collections.abc import Sequence

from pollux.loop.report import report_of
from pollux.training.training import Training


def scalars(training: Training, rates: Sequence[float]) -> dict[str, float]:
    """Return the present numbers, as `Job.scalars` describes them. `rates`: of each parameter group."""
    report = report_of(training)
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
    groups = training.models[0].optimizer.param_groups
    for number, (group, rate) in enumerate(zip(groups, rates, strict=False)):
        values[f"lr/{group.get('name', number)}"] = rate
    noise = training.noise_scale
    if noise is not None and noise.sqr > 0:
        values["noise_scale"] = noise.phi(training.limits.initial)
    return {f"pollux/{name}": float(value) for name, value in values.items()}
