"""The numbers of a job that belong on a chart, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pollux.loop.report import report_of

if TYPE_CHECKING:
    from pollux.loop.session import Job


def scalars(job: Job) -> dict[str, float]:
    """The present numbers of a job by name; unknown ones are left out.

    `pollux/progress` is in scale-invariant steps, `pollux/epoch` in statistical epochs, `pollux/noise_scale` in
    examples, `pollux/goodput` and `pollux/throughput` in examples per second (0 until measured).
    """
    report = report_of(job.training)
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
    noise = job.noise_scale
    if noise is not None and noise.sqr > 0:
        values["noise_scale"] = noise.phi(job.limits.initial)
    return {f"pollux/{name}": float(value) for name, value in values.items()}
