"""Steps that are as the one before: they take a short way through the agent."""

from __future__ import annotations

from collections.abc import Callable

from pollux.training.step import StepGroup
from pollux.training.training import Training


def alike(training: Training, group: StepGroup, quiet: Callable[[], int]) -> int:
    """Return how many coming steps are as this one in all that the agent plans.

    They have one whole pass, are neither measured nor timed, end no epoch, and bring no decision. Until then a step
    costs a few lines. What may change the plan sets it back (`Stepper.plan_anew`). `quiet`: as `Stepper.quiet`.
    """
    step, progress, model = training.step, training.progress, training.models[0]
    if not (step.looped and step.accumulates) or model.unused_looks or len(training.models) > 1:
        return 0
    still = 0 if training.timer.timing else quiet() - 1
    if still < 1 or group.samples != training.world.size * group.local_batch:
        return 0
    left = progress.epoch_from + training.data.length - progress.examples
    if progress.target is not None:
        left = min(left, progress.target - progress.examples)
    if step.passes_only:
        part = 1.0 if progress.passes is None else min(progress.passes - progress.epoch, 1.0)
        left = part * training.data.length - training.data.position
    return min(
        training.data.whole(),
        training.timer.untimed(),
        model.meter.unmeasured(progress.optimizer_steps + 1) - 1,
        still,
        int(left / group.samples) - 3,
    )
