"""Notice a loop that uses other batches than the loader's newest: something reads the loader ahead."""

from __future__ import annotations

import logging
from threading import get_ident

from pollux.errors import LoopMistake
from pollux.loop.slips import LEFT_OUT, READ_AHEAD
from pollux.training.training import Training

logger = logging.getLogger("pollux")


class BatchInHand:
    """The batch that the loader gave last, and whether the script's passes use it."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self.first = False
        """No pass of the loop is over."""
        self._warned = self._told = False
        self.thread: int | None = 0
        """The thread in which the loader gave its newest batch. None: it has given its last; 0: none yet."""

    def enter(self) -> None:
        """A loop over the loader begins."""
        self.first, self.thread = True, 0

    def end(self) -> None:
        """The loader has given its last batch."""
        self.thread = None

    def check(self) -> None:
        """Raise LoopMistake where the batch of a pass that begins cannot be the loader's newest."""
        if self.thread not in (0, get_ident()):
            raise LoopMistake(READ_AHEAD)

    def after_pass(self, *, skipped: bool) -> None:
        """After the first pass of a loop: warn where the script has not used its batch."""
        self.first = False
        step, models = self._training.step, self._training.models
        used = step.entered or step.stepped or skipped
        if used or self._warned or any(p.grad is not None for m in models for p in m.module.parameters()):
            return
        self._warned = True
        logger.warning(READ_AHEAD)

    def tell_left_out(self) -> None:
        """Warn once of a pass without a backward pass: the other ranks may wait for this one for minutes."""
        if not self._told:
            self._told = True
            logger.warning(LEFT_OUT, self._training.world.rank)
