"""The one place where the scheduler's orders to a job arrive, on rank 0."""

from __future__ import annotations

from pollux.resize.resizer import Resizer
from pollux.scheduler.drains import Drains
from pollux.scheduler.orders import DrainOrder, Order, ResizeOrder, ResizeWithdrawn


class Inbox:
    """Takes orders from any thread. The training thread asks it what all ranks are to act on."""

    def __init__(self, drains: Drains, resizer: Resizer) -> None:
        self._drains, self._resizer = drains, resizer

    def put(self, order: Order) -> None:
        """An order has come; any thread."""
        match order:
            case DrainOrder(move):
                self._drains.order(move)
            case ResizeOrder(terms):
                self._resizer.order(terms, resting=self._drains.resting)
            case ResizeWithdrawn():
                self._resizer.withdraw()

    def wanted(self) -> tuple[int, int]:
        """Moves to drain and to be resized for, by the next decision; 0: none."""
        return self._drains.wanted(), self._resizer.offer()
