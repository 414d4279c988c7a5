"""The ends of a training's steps: the last one made, the loop left early, the job closed.

What was trained is kept, and an order of the scheduler's that was on its way is answered.
"""

from __future__ import annotations

import logging
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from pollux.checkpoint.restart import Restart
from pollux.data.place import ElasticData
from pollux.errors import RankLost
from pollux.learning_rate.progress import Progress
from pollux.ranks.control import ControlExchange
from pollux.ranks.world import World
from pollux.tuning.knowledge import LastAttempt

logger = logging.getLogger("pollux")

STOP_WAIT = timedelta(seconds=60)
"""For the other ranks, where a training is closed before its end."""


class Endings(ABC):
    """The part of `Stepper` that ends a training, or begins it once more."""

    data: ElasticData
    progress: Progress
    _world: World
    _restart: Restart
    _exchange: ControlExchange
    _parts: Callable[[], Mapping[str, Any]]
    _left: bool

    @abstractmethod
    def _known(self) -> LastAttempt: ...

    def finish(self) -> None:
        """Training is over: nothing is lost from here on, whatever happens to the job."""
        if self.progress.finished:
            self._restart.rest()  # as its checkpoint says: this attempt had nothing left to train
            return
        self.progress.finished = True
        self._end()

    def stop(self) -> None:
        """The user is done before the last epoch: what was trained since the newest checkpoint is kept.

        Every rank calls it. A restart goes on from there.
        """
        if self.progress.finished or self._restart.directory is None:
            return
        if sys.exc_info()[0] is not None:
            return  # an error is under way: the other ranks may not come, and the state may be half made
        try:
            self._exchange.barrier(STOP_WAIT)
            kept = self._restart.keeps(self.progress.optimizer_steps)
            self._end(kept=self._exchange.gather(kept)[0])
        except RankLost as error:
            logger.warning("no last checkpoint: %s", error)

    def left(self) -> None:
        """The loop over the epochs was left: rank 0 answers an order to drain by a checkpoint of its own."""
        self._left = True
        if self._world.rank == 0 and not self._restart.sharded:
            self._restart.rest(self._save_alone)
            if self._exchange.under_way is not None:
                self._restart.ask_drain(self._exchange.under_way.move)

    def _save_alone(self) -> float | None:
        return self._restart.save(
            self._parts(), self.data, ControlExchange(None, 0), self._known(), durable=True
        )

    def _end(self, *, kept: bool = False) -> None:
        decision = self._exchange.take()
        if kept:
            self._restart.rest()
        else:
            self._restart.finish(self._parts(), self.data, self._exchange, self._known())
        if self._world.rank == 0 and decision is not None and decision.move:
            # Its order was on its way to the ranks, who will exchange no more: the last checkpoint answers it.
            self._restart.ask_drain(decision.move)

    def start_over(self) -> None:
        """An epoch begins: a training that counted as finished (fewer epochs, a first of several loops) goes on."""
        self.progress.finished = False
        self._restart.train_on()
