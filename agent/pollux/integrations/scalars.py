"""The numbers of a job that belong on a chart, by name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from pollux.errors import PolluxAgentError
from pollux.loop.report import report_of

if TYPE_CHECKING:
    from pollux.loop.session import Job


def scalars(job: Job) -> dict[str, float]:
    """The present numbers of a job by name; unknown ones are left out.

    `pollux/progress` is in scale-invariant steps, `pollux/epoch` in statistical epochs, `pollux/noise_scale` in
    examples, `pollux/goodput` and `pollux/throughput` in examples per second (0 until measured). `pollux/lr/<group>` is
    the learning rate of a parameter group in the newest optimizer step. A group's name is its number, or the "name"
    that the script gave it.
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
    groups = job.optimizer.param_groups
    for number, (group, rate) in enumerate(zip(groups, job.learning_rates, strict=False)):
        values[f"lr/{group.get('name', number)}"] = rate
    noise = job.noise_scale
    if noise is not None and noise.sqr > 0:
        values["noise_scale"] = noise.phi(job.limits.initial)
    return {f"pollux/{name}": float(value) for name, value in values.items()}


class EveryStep(ABC):
    """Writes `scalars(job)` after every `every`-th optimizer step, on rank 0.

    Make it after `job.loader`. Raises PolluxAgentError.
    """

    def __init__(self, job: Job, every: int) -> None:
        if every < 1:
            raise PolluxAgentError(
                f"expected to write after every so many steps, 1 or more, got every={every}"
            )
        self._job, self._every = job, every
        self._step = job.progress.optimizer_steps
        self._handle = job.optimizer.register_step_post_hook(self._after_step)

    def _after_step(self, *_: Any) -> None:
        self._step += 1
        if self._job.is_main and self._step % self._every == 0:
            self._write(self._step, scalars(self._job))

    @abstractmethod
    def _write(self, step: int, values: dict[str, float]) -> None: ...

    def close(self) -> None:
        """Write no more."""
        self._handle.remove()
