"""A drain: the scheduler wants the job to stop at a checkpoint, which rank 0 acknowledges.

polluxd asks through the publisher; rank 0 passes it on in its next decision; all ranks come here after the same
optimizer step and the checkpoint at it; rank 0 acknowledges; all wait to be killed, for a bounded time, and train on if
nobody came. Where no steps are taken any more, the newest checkpoint answers at once.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pollux.errors import RankLost
from pollux.ranks.control import ControlExchange, Decision
from pollux.ranks.world import World

if TYPE_CHECKING:
    from pollux.scheduler.publisher import Publisher

logger = logging.getLogger("pollux")

DRAIN_WAIT = 120.0
"""Seconds that a drained job waits to be killed before it trains on."""

KILL_WAIT = 20.0
"""Seconds for which a drained rank whose peers are gone waits to be killed too, before it calls that an error."""


class Draining(ABC):
    """The part of `Restart` that answers orders to drain."""

    world: World
    _publisher: Publisher | None
    _last_step_at: float

    def __init__(self, wait: float) -> None:
        """`wait`: seconds that a drained job waits to be killed."""
        self._wait = wait
        self._drain = 0
        self._drained: set[int] = set()
        self._done = False
        self._late: Callable[[], float | None] | None = None

    @property
    @abstractmethod
    def _saved(self) -> int | None:
        """The optimizer step of the newest durable checkpoint."""

    def ask_drain(self, move: int) -> None:
        """Called off the main thread: the scheduler wants this job to stop at a checkpoint."""
        self._drain = move
        # In this order, and in `finish` the other way round: whichever comes last sees the other.
        if self._done:
            self._acknowledge_at_the_end()

    def _acknowledge_at_the_end(self) -> None:
        """The loop is over and its last checkpoint stands: nothing will be lost."""
        move, self._drain = self._drain, 0
        if move and self._publisher is not None and move not in self._drained:
            self._drained.add(move)
            # Not here: this may be the publisher's own thread, which has to send it.
            threading.Thread(target=self._answer, args=(move, self._late), daemon=True).start()

    def _answer(self, move: int, late: Callable[[], float | None] | None) -> None:
        seconds = late() if late is not None else 0.0
        if seconds is None or self._saved is None or self._publisher is None:
            logger.error("move %d: no checkpoint could be written", move)
        elif self._publisher.acknowledge(move, self._receipt(seconds, self._saved)):
            return
        self._drained.discard(move)

    def drain(self, move: int, seconds: float | None, exchange: ControlExchange) -> None:
        """After the checkpoint of a drain: acknowledge, and wait to be killed."""
        self._drained.add(move)
        if self.world.rank == 0:
            if seconds is None or self._saved is None:
                logger.error("move %d: no checkpoint could be written, so training goes on", move)
            elif self._publisher is None or self._publisher.acknowledge(
                move, self._receipt(seconds, self._saved)
            ):
                logger.info("drained for move %d in %.2f s", move, seconds)
                self._wait_for_end()
            else:
                # Refused, or nobody heard it: in the second case the order comes again.
                self._drained.discard(move)
                logger.error("move %d: acknowledgement not taken, training goes on", move)
        try:
            exchange.agree(Decision())
        except RankLost:
            # The other node's ranks were killed a moment before this one will be; if not, it is a loss like any.
            time.sleep(min(self._wait, KILL_WAIT))
            raise

    def _wait_for_end(self) -> None:
        end = time.monotonic() + self._wait
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        logger.warning("nobody ended this job in %.0f s after its drain: it trains on", self._wait)

    def wake(self) -> None:
        """Report now: there is news that the scheduler waits for."""
        if self._publisher is not None:
            self._publisher.wake()

    @property
    def reports(self) -> bool:
        """This rank talks to the scheduler."""
        return self._publisher is not None

    @property
    def last_step_at(self) -> float:
        """When the newest optimizer step was over; POSIX seconds, 0 before the first."""
        return self._last_step_at

    def answer_resize(self, move: int, *, seconds: float, step: int, last_step_at: float) -> bool:
        """Acknowledge a resize: whoever was to leave has left. May take a while; False where it is over, or unheard."""
        if self._publisher is None:
            return False
        receipt = self._receipt(seconds, step) | {"last_step_at": last_step_at}
        return self._publisher.acknowledge(move, receipt)

    def _receipt(self, seconds: float, step: int) -> dict[str, Any]:
        return {
            "last_step_at": self._last_step_at,
            "stopped_at": time.time(),
            "checkpoint_s": seconds,
            "step": step,
        }

    def rest(self, late: Callable[[], float | None] | None = None) -> None:
        """Nothing is trained any more beyond the newest checkpoint: an order to drain is answered at once.

        Where that is not written yet, `late` writes it, then, in a thread; seconds it took, None where it failed.
        """
        self._late = late
        self._done = True
        self._acknowledge_at_the_end()

    @property
    def resting(self) -> bool:
        """No steps are taken any more."""
        return self._done

    def train_on(self) -> None:
        """Steps are taken (again): an order to drain waits for a checkpoint that holds them."""
        self._done = False
