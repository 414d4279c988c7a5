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
        pattern: glob(7), `**` included. Where it matches a folder, the newest file right in it counts.
    """

    def __init__(self, pattern: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._pattern, self._clock = pattern, clock
        self._looked_at = float("-inf")
        self._mark = self._newest()
        self._changed_at: float | None = None
        """When the newest file was last seen to change; None: not since the start."""
        self._saves: deque[float] = deque(maxlen=3)
        self._saving = False

    def look(self) -> None:
        """Look at the files, once a second at most."""
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return
        self._looked_at = now
        mark = self._newest()
        if mark != self._mark:
            self._mark, self._changed_at, self._saving = mark, now, True
        elif self._saving and self._changed_at is not None and now - self._changed_at >= QUIET_S:
            self._saving = False
            self._saves.append(self._changed_at)

    @property
    def present(self) -> bool:
        """There is a checkpoint."""
        return self._mark is not None

    def saved_since(self, when: float) -> bool:
        """Tell whether a checkpoint was completed that began to change after this time of the clock."""
        return bool(self._saves) and self._saves[-1] > when

    @property
    def every(self) -> float | None:
        """Seconds from one checkpoint to the next; None before two were seen."""
        return self._saves[-1] - self._saves[-2] if len(self._saves) > 1 else None

    def next_in(self, otherwise: float | None = None) -> float | None:
        """Return the seconds to the next checkpoint, by the last two; `otherwise`: their distance, if unknown here."""
        every = self.every or otherwise
        if every is None:
            return None
        last = self._saves[-1] if self._saves else None
        return every if last is None else max(every - (self._clock() - last), 0.0)

    def _newest(self) -> _Mark | None:
        found: _Mark | None = None
        for name in itertools.islice(glob.iglob(self._pattern, recursive=True), MOST_NAMES):
            with contextlib.suppress(OSError):
                mark = _mark(name)
                found = mark if found is None else max(found, mark)
        return found


def _mark(name: str) -> _Mark:
    facts = os.stat(name)
    mark = facts.st_mtime, name, facts.st_size
    if os.path.isdir(name):
        with os.scandir(name) as entries:
            for entry in itertools.islice(entries, MOST_NAMES):
                inside = entry.stat(follow_symlinks=False)
                mark = max(mark, (inside.st_mtime, entry.path, inside.st_size))
    return mark
