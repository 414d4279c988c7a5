"""Drain a job: stop it at a checkpoint, and acknowledge the checkpoint.

Rank 0 passes the order on in its next decision. All ranks write a checkpoint after the same optimizer step, and rank 0
acknowledges it. All ranks then wait for Slurm to kill them, for a limited time. If Slurm does not, or the scheduler
takes its order back, they train on. If
the training makes no more steps, rank 0 acknowledges the newest checkpoint at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from pollux.errors import RankLost
from pollux.ranks.control import ControlExchange, Decision
from pollux.scheduler.line import Receipt, SchedulerLine

logger = logging.getLogger("pollux")

KILL_WAIT = 20.0
"""Seconds that a drained rank waits for its own kill after its peers are gone. Later the loss counts as an error."""


class Drains:
    """Orders to drain, and their answers."""

    def __init__(self, line: SchedulerLine, wait: float) -> None:
        """`wait`: seconds that a drained job waits to be killed."""
        self._line, self.wait = line, wait
        self._ordered = 0
        self._withdrawn = threading.Event()
        self.followed: set[int] = set()
        """Moves whose order was followed or is being answered."""
        self._final_receipt: Callable[[], Receipt | None] | None = None

    # -- rank 0, any thread -----------------------------------------------------------------------------------

    def order(self, move: int) -> None:
        """The scheduler wants this job to stop at a checkpoint; 0: it wants that no more."""
        self._ordered = move
        if not move:
            self._withdrawn.set()
            return
        self._withdrawn.clear()
        # In this order, and in `rest` in the opposite order: then the later of the two sees the other.
        if self._final_receipt is not None:
            self._answer_at_rest(self._final_receipt)

    def rest(self, final_receipt: Callable[[], Receipt | None]) -> None:
        """Answer orders at once, in a thread: the training makes no more steps.

        `final_receipt` returns the checkpoint of the last step, and writes it first if necessary. None: it failed.
        """
        self._final_receipt = final_receipt
        self._answer_at_rest(final_receipt)

    def train_on(self) -> None:
        """Let orders wait for a checkpoint: the training makes steps (again)."""
        self._final_receipt = None

    @property
    def resting(self) -> bool:
        """No steps are taken any more."""
        return self._final_receipt is not None

    def _answer_at_rest(self, final_receipt: Callable[[], Receipt | None]) -> None:
        move = self.wanted()
        if move and self._line.connected:
            self.followed.add(move)
            # In a thread: this may be the publisher's own, which has to send the answer.
            threading.Thread(target=self._answer, args=(move, final_receipt), daemon=True).start()

    def _answer(self, move: int, final_receipt: Callable[[], Receipt | None]) -> None:
        receipt = final_receipt()
        if receipt is None:
            logger.error("move %d: no checkpoint could be written", move)
        elif self._line.acknowledge(move, receipt, time.time()):
            return
        self.followed.discard(move)

    # -- the training thread ----------------------------------------------------------------------------------

    def wanted(self) -> int:
        """The move to drain for now, once; 0 where there is none."""
        move, self._ordered = self._ordered, 0
        return 0 if move in self.followed else move

    def drain(self, move: int, receipt: Receipt | None, exchange: ControlExchange) -> None:
        """On every rank: acknowledge the checkpoint, wait to be killed.

        `receipt` is rank 0's; None where no checkpoint could be written: the training goes on.
        """
        self.followed.add(move)
        if exchange.rank == 0:
            if receipt is None:
                logger.error("move %d: no checkpoint could be written, so training goes on", move)
            elif not self._line.connected or self._line.acknowledge(move, receipt, time.time()):
                logger.info("drained for move %d in %.2f s", move, receipt.checkpoint_s)
                self.wait_for_end()
            else:
                # polluxd refused the answer or did not get it. If it did not get it, the order comes again.
                self.followed.discard(move)
                logger.error("move %d: acknowledgement not taken, training goes on", move)
        try:
            exchange.agree(Decision())
        except RankLost:
            # Slurm kills the other nodes' ranks a moment before this one. If it does not, the rank is lost.
            time.sleep(min(self.wait, KILL_WAIT))
            raise

    def wait_for_end(self) -> None:
        """Wait to be killed, for a bounded time, or until polluxd has ended the move without a requeue."""
        if self._withdrawn.wait(self.wait):
            logger.warning("polluxd has ended the move for which this job has drained: it trains on")
            return
        logger.warning("nobody ended this job in %.0f s after its drain: it trains on", self.wait)
