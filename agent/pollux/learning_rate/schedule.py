"""Advance the user's learning-rate scheduler as the epochs are counted.

A schedule for steps of M0 examples must advance by M / M0 at a step of M examples where epochs are passes through the
data, and by the step's gain where they are statistical. The user calls
`scheduler.step()` once per optimizer step; the agent adds the missing calls after the step. The scheduler object is not
changed. Calls between epochs are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pollux.ranks.torch_internals import scheduler_calls


class ScaledSchedule:
    """Add calls to one scheduler for the extra worth of larger batches."""

    def __init__(self, scheduler: Any | None) -> None:
        # A plateau scheduler needs the user's metric.
        self._scheduler = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._before = 0
        self._carry = 0.0

    def _count(self) -> int:
        return scheduler_calls(self._scheduler)

    def begin(self) -> None:
        """Note the scheduler's calls before a step's first micro-batch."""
        if self._scheduler is not None:
            self._before = self._count()

    def step(self) -> None:
        """Step the scheduler once, unless it is at its end, or a plateau scheduler, which needs a metric."""
        if self._scheduler is not None and not self._at_its_end():
            self._scheduler.step()

    def end(self, worth: float) -> int:
        """Add the missing calls after a step worth so many steps of M0 examples.

        Return the calls that the script made: 1 at most, or its schedule is too fast.
        """
        if self._scheduler is None:
            return 0
        made = self._count() - self._before
        if made < 1:
            return 0
        # The short step at a pass's end is worth less than its call; the difference delays later additions.
        self._carry += worth - made
        while self._carry >= 1.0 and not self._at_its_end():
            self._scheduler.step()
            self._carry -= 1.0
        return made

    def _at_its_end(self) -> bool:
        """Tell whether a schedule of fixed length (OneCycleLR) is complete. It raises if stepped beyond its end."""
        total = getattr(self._scheduler, "total_steps", None)
        return total is not None and int(getattr(self._scheduler, "last_epoch", 0)) >= int(total)

    def state_dict(self) -> dict[str, float]:
        return {"carry": self._carry}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._carry = float(state["carry"])
