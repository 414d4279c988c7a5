"""Watch a trainer's own checkpoints."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import time
from collections import deque
from collections.abc import Callable

MOST_NAMES = 10_000
QUIET_S = 1.0
"""A checkpoint is complete once nothing of it has changed for this long."""
_LOOK_S = 1.0

_Mark = tuple[float, str, int]
"""Time of change, name and size of the newest file."""


class Checkpoints:
    """What matches a pattern, by this process's clock: a file system's may differ from the node's.

    Args:
        pattern: glob(7), `**` included. Where it matches a folder, the newest file right in it counts. What belongs to
            another user counts for nothing: it would let an order be answered without a checkpoint.
        step: the trainer's newest one. Trainers save each so many steps, which take another time at another size.
    """

    def __init__(
        self,
        pattern: str,
        clock: Callable[[], float] = time.monotonic,
        step: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._pattern, self._clock, self._step = pattern, clock, step
        self._look_at = float("-inf")
        self._mark = self._newest()
        self._changed_at: float | None = None
        """When the newest file was last seen to change; None: not since the start."""
        self._changed_at_step = 0.0
        self._saves: deque[tuple[float, float]] = deque(maxlen=2)
        """Times and steps of the newest checkpoints. The first step after a start stands for the one before it."""
        self._completed = 0
        self._saving = False

    def trains(self) -> None:
        """Take in that the trainer has made its first step since its start, from the checkpoint before."""
        self._saves.clear()
        self._saves.append((self._clock(), self._step()))
        self._completed = 0

    def look(self) -> None:
        """Look at the files, once a second at most."""
        now = self._clock()
        if now < self._look_at:
            return
        mark = self._newest()
        # A slow file system is not asked all the time.
        self._look_at = now + max(_LOOK_S, 10.0 * (self._clock() - now))
        if mark != self._mark:
            self._mark, self._changed_at, self._saving = mark, now, True
            self._changed_at_step = self._step()
        elif self._saving and self._changed_at is not None and now - self._changed_at >= QUIET_S:
            self._saving = False
            self._saves.append((self._changed_at, self._changed_at_step))
            self._completed += 1

    @property
    def present(self) -> bool:
        """There is a checkpoint."""
        return self._mark is not None

    def saved_since(self, when: float) -> bool:
        """Tell whether a checkpoint was completed that began to change after this time of the clock."""
        return self._completed > 0 and self._saves[-1][0] > when

    @property
    def age(self) -> float:
        """Seconds since the newest checkpoint was complete, or since the first step."""
        return self._clock() - self._saves[-1][0] if self._saves else 0.0

    @property
    def last_step(self) -> float:
        """The trainer's step at the newest checkpoint, or at its start."""
        return self._saves[-1][1] if self._saves else 0.0

    @property
    def every(self) -> float | None:
        """Steps from one checkpoint to the next, by the last two; None before they were seen."""
        steps = self._saves[-1][1] - self._saves[-2][1] if len(self._saves) > 1 else 0.0
        return steps if steps > 0 else None

    def next_in(self, step_s: float | None, every: float | None = None) -> float | None:
        """Return the seconds to the next checkpoint; None where that is not known. One that is late comes at once.

        Args:
            step_s: time of a step [s].
            every: steps between checkpoints, until two were seen here.
        """
        every = self.every or every
        if every is None or step_s is None:
            return None
        return max(every - (self._step() - self.last_step), 0.0) * step_s

    def _newest(self) -> _Mark | None:
        found: _Mark | None = None
        for name in itertools.islice(glob.iglob(self._pattern, recursive=True), MOST_NAMES):
            with contextlib.suppress(OSError):
                if mark := _mark(name):
                    found = mark if found is None else max(found, mark)
        return found


def _mark(name: str) -> _Mark | None:
    """Return what is newest of a file or a folder; None: it, or a link in its place, is another user's."""
    facts = os.stat(name)
    if {facts.st_uid, os.lstat(name).st_uid} != {os.geteuid()}:
        return None
    mark = facts.st_mtime, name, facts.st_size
    if os.path.isdir(name):
        with os.scandir(name) as entries:
            for entry in itertools.islice(entries, MOST_NAMES):
                inside = entry.stat(follow_symlinks=False)
                if inside.st_uid == facts.st_uid:
                    mark = max(mark, (inside.st_mtime, entry.path, inside.st_size))
    return mark
