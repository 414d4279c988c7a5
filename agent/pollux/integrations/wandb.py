"""Scalars of a job in a run of Weights & Biases, written as it trains.

job = pollux.attach(model, optimizer)
loader = job.loader(...)
charts = Charts(job, wandb.init(...) if job.is_main else None)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pollux.integrations.scalars import EveryStep

if TYPE_CHECKING:
    from pollux.loop.session import Job

AXIS = "pollux/optimizer_step"


class Charts(EveryStep):
    """Logs `scalars(job)` to `run` after every `every`-th optimizer step.

    `run` is what `wandb.init` returns; other ranks than 0 may pass None. The charts run over optimizer steps, whatever
    the script itself logs.
    """

    def __init__(self, job: Job, run: Any, *, every: int = 10) -> None:
        super().__init__(job, every)
        self._run = run
        if job.is_main:
            run.define_metric("pollux/*", step_metric=AXIS)

    def _write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({AXIS: step, **values})
