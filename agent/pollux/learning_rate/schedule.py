"""The user's learning-rate scheduler, seen in scale-invariant steps.

A schedule written for steps of M0 examples must advance by `gain` at a step that is worth `gain` of them. The user
goes on calling `scheduler.step()` once per optimizer step; what is missing is made up for when the step is over. The
scheduler object itself is not touched. Calls between epochs are epochs' affair and pass unnoticed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pollux.ranks.torch_internals import scheduler_calls


class ScaledSchedule:
    """Advances one scheduler by the steps that larger batches were worth beyond the user's own calls."""

    def __init__(self, scheduler: Any | None) -> None:
        # A plateau is found from a metric, which only the user has.
        self._scheduler = None if isinstance(scheduler, ReduceLROnPlateau) else scheduler
        self._before = 0
        self._carry = 0.0

    def _count(self) -> int:
        return scheduler_calls(self._scheduler)

    def begin(self) -> None:
        """Before a step's first micro-batch."""
        if self._scheduler is not None:
            self._before = self._count()

    def end(self, gain: float) -> None:
        """After a step worth `gain` steps of M0 examples: make up for what the user's call in it left out."""
        if self._scheduler is None:
            return
        made = self._count() - self._before
        if made < 1:
            return
        # The short step at a pass's end is worth less than its call: later calls are then not added to so soon.
        self._carry += gain - made
        while self._carry >= 1.0 and not self._at_its_end():
            self._scheduler.step()
            self._carry -= 1.0

    def _at_its_end(self) -> bool:
        """A schedule of a stated length (OneCycleLR) raises when stepped beyond it; a large last step overshoots."""
        total = getattr(self._scheduler, "total_steps", None)
        return total is not None and int(getattr(self._scheduler, "last_epoch", 0)) >= int(total)

    def state_dict(self) -> dict[str, float]:
        return {"carry": self._carry}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._carry = float(state["carry"])
