"""End a training in which one rank has left the loop over the loader alone.

Such a rank waits for the next decision, and the others wait for it in the reduction of a further step. No decision
arrives that would show it. So a rank that makes no progress leaves its place in the store of the ranks' group.

The ranks exchange decisions after the same passes. If another rank has made more passes than this one, and has come to
fewer exchanges, no honest training can be there, however long a rank evaluates or saves alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
import torch.distributed as dist

from pollux.errors import LoopMistake, RankLost
from pollux.loop.slips import BEHIND, SILENT, WAITS
from pollux.ranks.control import OTHER_PLACE, ControlExchange
from pollux.ranks.torch_internals import process_groups
from pollux.training.training import Training

logger = logging.getLogger("pollux")

_LOOKS = 2
"""Without progress, after which the ranks that are behind are named: a minute, at the default patience."""
_TAG = 0x706F6C79
"""Of a message that nobody sends."""


class Places:
    """Where the ranks of one process group are; one object per rank and group."""

    def __init__(self, training: Training, patience: float) -> None:
        """`patience`: seconds without progress after which a rank says that it waits, and where it is."""
        self.exchanges = self.steps = 0
        """Decisions and optimizer steps that this rank has come to in the group."""
        self.group = training.world.control
        self._training, self._patience = training, patience
        self._waits = False
        self._mistake = ""
        self._closed = Event()

    def close(self) -> None:
        """Watch no longer."""
        self._closed.set()

    def after_step(self) -> None:
        """Count an optimizer step."""
        if self.group is not None and not self.steps:
            store = process_groups()[self.group]
            Thread(target=self._watch, args=(store,), name="pollux-places", daemon=True).start()
        self._training.step.entered = 0  # before the count, so that a place is never too far (`_here`)
        self.steps += 1

    @contextmanager
    def waiting(self, exchange: ControlExchange) -> Iterator[None]:
        """Exchange a decision outside of the loop, then wait for all ranks.

        A decision alone may reach a rank that is still in the loop, and reads it a step later. Raises LoopMistake where
        a rank cannot come.
        """
        self._waits = True
        try:
            yield
            if self._training.world.control is self.group:  # a resize ends with all ranks there
                self.exchanges += 1
                exchange.gather(None)
        except RankLost as error:
            if self._mistake:
                raise LoopMistake(self._mistake) from error
            raise
        finally:
            self._waits = False

    # -- in a thread ------------------------------------------------------------------------------------------

    def _here(self) -> list[int]:
        """Exchanges, steps, passes since the last step; epoch and sample for the message.

        While the training goes on, the passes may be too few, and the exchanges too many: such a place accuses nobody.
        """
        progress = [self.steps, self._training.step.entered]
        return [self.exchanges, *progress, self._training.progress.epoch, self._training.data.position]

    def _watch(self, store: Any) -> None:
        before = left = None
        rests = 0
        """Looks in a row without progress."""
        while not self._closed.wait(self._patience or None):
            here = self._here()
            rests = rests + 1 if here == before else 0
            if rests:
                with suppress(RuntimeError, RankLost):  # the store is gone with its rank
                    if here != left:
                        left = here
                        store.set(f"place-{self._training.world.rank}", json.dumps(here))
                        if self._waits:
                            logger.warning(WAITS, self._training.world.rank, self._patience)
                    if rests == _LOOKS:
                        self._name_who_is_behind(here, store)
                    if self._waits:
                        self._look(here, store)
            before = here

    def _name_who_is_behind(self, here: list[int], store: Any) -> None:
        """Say for which ranks the others wait; the first of those that wait says it.

        A rank that is behind has made fewer passes, or has left no place: a stopped process leaves none.
        """
        world, behind = self._training.world, []
        for other in range(world.size):
            key = f"place-{other}"
            there = json.loads(store.get(key)) if store.check([key]) else None
            if there is not None and there[1:3] > here[1:3]:
                return  # this rank is behind itself
            if other != world.rank and (there is None or there[1:3] < here[1:3]):
                behind.append((other, there))
        if behind and all(other in [each for each, _ in behind] for other in range(world.rank)):
            names = ", ".join(f"rank {other} on {world.places[other]}" for other, _ in behind[:4])
            more = f" and {len(behind) - 4} more" if len(behind) > 4 else ""
            silent = any(there is None for _, there in behind)
            logger.warning(BEHIND, self._patience * _LOOKS, f"{names}{more}", SILENT if silent else "")

    def _look(self, here: list[int], store: Any) -> None:
        """Compare this rank's place, where it waits, with rank 0's; on rank 0 with all others'."""
        rank, size = self._training.world.rank, self._training.world.size
        for other in [0] if rank else range(1, size):
            key = f"place-{other}"
            if not store.check([key]):
                continue
            there = json.loads(store.get(key))
            if there[0] < here[0] and there[1:3] > here[1:3]:
                first, second = (there, here) if rank else (here, there)
                self._mistake = OTHER_PLACE.format(*first[3:], rank or other, *second[3:])
                self._break_off()

    def _break_off(self) -> None:
        """Fail what this rank waits for: gloo closes a group's connections where a wait times out."""
        nothing = dist.irecv(torch.empty(1), group=self.group, tag=_TAG)
        assert nothing is not None
        nothing.wait(timedelta(milliseconds=1))
