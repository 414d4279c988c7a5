"""Advance the user's learning-rate scheduler as the epochs are counted.

A schedule for steps of M0 examples must advance by M / M0 at a step of M examples where epochs are passes through the
data, and by the step's gain where they are statistical. The user calls
`scheduler.step()` once per optimizer step; the agent adds the missing calls after the step. The scheduler object is not
changed. Calls between epochs are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer
from torch.optim import lr_scheduler as kinds

from pollux.ranks.torch_internals import scheduler_calls

PER_EPOCH = (
    "{kind} looks like a schedule of epochs, and is stepped once per optimizer step: {why}. Make it for steps "
    "(math.ceil(len(dataset) / batch_size) of them are an epoch), or leave it out of `attach`: give it as "
    'state={{"schedule": scheduler}}, and call scheduler.step() after the loop over the loader'
)

BETWEEN = (
    "scheduler.step() was called between two optimizer steps, and job.step(...) calls it in each of them, too. Leave "
    'out the script\'s call. A schedule of epochs: give it as state={"schedule": scheduler} and not as the '
    "scheduler of `attach`, and call scheduler.step() after the loop over the loader"
)

NOTHING_LEFT = 1e-5
"""Share of the highest learning rate at which a training makes no more progress; OneCycleLR ends at 4e-6."""


class Schedules:
    """The schedules of several optimizers, stepped at once."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = list(parts)

    @property
    def _step_count(self) -> int:
        return max(map(scheduler_calls, self.parts))

    def step(self) -> None:
        for part in self.parts:
            if not at_its_end(part):
                part.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): part.state_dict() for number, part in enumerate(self.parts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for number, part in enumerate(self.parts):
            part.load_state_dict(state[str(number)])


def at_its_end(scheduler: Any) -> bool:
    """Tell whether a schedule of fixed length (OneCycleLR) is complete. It raises if stepped beyond its end."""
    total = getattr(scheduler, "total_steps", None)
    return total is not None and int(getattr(scheduler, "last_epoch", 0)) >= int(total)


class ScaledSchedule:
    """Add calls to one scheduler for the extra worth of larger batches."""

    def __init__(self, scheduler: Any | None) -> None:
        # A plateau scheduler needs the user's metric.
        self._scheduler: Any = None if isinstance(scheduler, kinds.ReduceLROnPlateau) else scheduler
        self._before = self._after = self._made = self._called = 0
        self._carry = 0.0
        self.steps = self.asks = self._scheduler is not None
        """`steps`: there is a schedule to follow. `asks`: it may be one of epochs, and `doubt` has not said so."""
        self._by_job = self._between = False
        self._highest = 0.0

    def _count(self) -> int:
        return scheduler_calls(self._scheduler)

    def begin(self) -> None:
        """Note the scheduler's calls before a step's first micro-batch."""
        self._before, self._called = self._count(), 0
        self._between = self._between or (self._by_job and self._before != self._after)

    def step(self) -> None:
        """Step the scheduler once, unless it is at its end, or a plateau scheduler, which needs a metric."""
        self._by_job = self._scheduler is not None
        if self._scheduler is not None and not at_its_end(self._scheduler):
            self._scheduler.step()
            self._called += 1

    def end(self, worth: float) -> int:
        """Add the missing calls after a step worth so many steps of M0 examples.

        Return the calls that the script made: 1 at most, or its schedule is too fast.
        """
        # CosineAnnealingWarmRestarts does not count its calls.
        made = self._made = self._count() - self._before or self._called
        self._after = self._count()
        if made < 1:
            return 0
        # The short step at a pass's end is worth less than its call; the difference delays later additions.
        self._carry += worth - made
        while self._carry >= 1.0 and not at_its_end(self._scheduler):
            self._scheduler.step()
            self._carry -= 1.0
        self._after = self._count()
        return made

    def doubt(self, done: float, total: float | None, each: float) -> str:
        """Return once why the schedule cannot be one of optimizer steps; empty: no doubt.

        After each step. `done` and `total`: steps of M0 examples of the training; None: not known. `each`: of an epoch.
        """
        text = BETWEEN if self._between else self._too_fast(done, total, each) if self._made else ""
        self.asks = not text
        return text

    def _too_fast(self, done: float, total: float | None, each: float) -> str:
        optimizer = getattr(self._scheduler, "optimizer", None)
        rates = [group["lr"] for group in optimizer.param_groups] if isinstance(optimizer, Optimizer) else []
        rate = max(
            (each for each in rates if isinstance(each, float)), default=0.0
        )  # a tensor may be on the device
        self._highest = max(self._highest, rate)
        kind, why = type(self._scheduler).__name__, ""
        if total is not None and each >= 2.0 and (span := _span(self._scheduler, total)) <= total / each:
            why = f"it is over after {span:g} calls, and the training has {total:.0f} steps in {total / each:g} epochs"
        elif (
            self._highest and rate < NOTHING_LEFT * self._highest and done < (0.5 * total if total else each)
        ):
            why = f"the learning rate has fallen from {self._highest:g} to {rate:.1g} in {done:.0f} steps"
            why += "" if total is None else f" of {total:.0f}"
        return PER_EPOCH.format(kind=kind, why=why) if why else ""

    def state_dict(self) -> dict[str, float]:
        return {"carry": self._carry}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._carry = float(state["carry"])


def _span(scheduler: Any, total: float) -> float:
    """Return after how many calls one of torch's schedules is over; infinite for others, and for a warm-up.

    A decay by a factor is over at once where `total` calls would leave less than a thousandth.
    """
    match scheduler:
        case Schedules():
            return min(_span(each, total) for each in scheduler.parts)
        case kinds.CosineAnnealingLR():
            return float(scheduler.T_max)
        case kinds.CosineAnnealingWarmRestarts():
            return float(scheduler.T_0)
        case kinds.OneCycleLR():
            return float(scheduler.total_steps)
        case kinds.MultiStepLR():
            return float(max(scheduler.milestones, default=math.inf))
        case kinds.PolynomialLR():
            return float(scheduler.total_iters)
        case kinds.LinearLR() if scheduler.end_factor < scheduler.start_factor:
            return float(scheduler.total_iters)
        case kinds.StepLR() | kinds.ExponentialLR():
            size = float(getattr(scheduler, "step_size", 1))
            return (
                size
                if 0.0 < scheduler.gamma <= 0.995 and scheduler.gamma ** (total / size) < 1e-3
                else math.inf
            )
        case kinds.SequentialLR():
            return float(scheduler._milestones[-1]) + _span(scheduler._schedulers[-1], total)
        case kinds.ChainedScheduler():
            return min(_span(each, total) for each in scheduler._schedulers)
    return math.inf
