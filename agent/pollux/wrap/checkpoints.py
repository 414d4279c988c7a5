"""Watch a trainer's own checkpoints."""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import stat
import time
from collections import deque
from collections.abc import Callable, Iterator

MOST_NAMES = 100_000
"""Names that one look passes: in a folder that others may write to, they may put any number, and loops of links."""
QUIET_S = 1.0
"""A checkpoint is complete once nothing of it has changed for this long."""
_LOOK_S = 1.0

_Mark = tuple[float, str, int]
"""Time of change, name and size of the newest file."""


class Checkpoints:
    """What matches a pattern, by this process's clock: a file system's may differ from the node's.

    Args:
        pattern: glob(7); `**` stands for any number of folders, and for none that a link leads to. Where it matches a
            folder, the newest file right in it counts. What another user makes or removes counts for nothing: an order
            would be answered without a checkpoint.
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
        self._present = self._mark is not None
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
        self._present = mark is not None
        # That one was removed is no checkpoint.
        if mark is not None and mark != self._mark and (self._mark is None or mark[0] >= self._mark[0]):
            self._mark, self._changed_at, self._saving = mark, now, True
            self._changed_at_step = self._step()
        elif self._saving and self._changed_at is not None and now - self._changed_at >= QUIET_S:
            self._saving = False
            self._saves.append((self._changed_at, self._changed_at_step))
            self._completed += 1

    @property
    def present(self) -> bool:
        """There is a checkpoint."""
        return self._present

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
        left = iter(range(MOST_NAMES))
        with contextlib.suppress(OSError):  # a server that is away
            for name in matching(self._pattern, left):
                with contextlib.suppress(OSError):
                    if mark := _mark(name, left):
                        found = mark if found is None else max(found, mark)
        return found


def matching(pattern: str, left: Iterator[int]) -> Iterator[str]:
    """Yield what matches, as glob(7) has it, and names that are not there. Each that is passed takes one of `left`."""
    ways = [("/" if pattern.startswith("/") else "", tuple(filter(None, pattern.split("/"))))]
    while ways:
        at, parts = ways.pop()
        if not parts:
            yield at
            continue
        part, rest = parts[0], parts[1:]
        if part == "**":
            ways.append((at, rest))  # of no folder
        elif not glob.has_magic(part):
            ways += [(os.path.join(at, part), rest)] if next(left, -1) >= 0 else []
            continue
        for entry in _entries(at, left):
            if entry.name.startswith(".") and not part.startswith("."):
                continue
            if part != "**":
                ways += [(entry.path, rest)] if fnmatch.fnmatchcase(entry.name, part) else []
            elif entry.is_dir(follow_symlinks=False):
                ways.append((entry.path, parts))
            elif not rest:
                ways.append((entry.path, ()))


def _entries(folder: str, left: Iterator[int]) -> Iterator[os.DirEntry[str]]:
    with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
        for entry, _ in zip(entries, left, strict=False):
            yield entry


def _mark(name: str, left: Iterator[int]) -> _Mark | None:
    """Return what is newest of a file or a folder; None: it, or a link in its place, is another user's."""
    facts = os.stat(name)
    if {facts.st_uid, os.lstat(name).st_uid} != {os.geteuid()}:
        return None
    if not stat.S_ISDIR(facts.st_mode):
        return facts.st_mtime, name, facts.st_size
    # Whoever may write to a folder changes its time.
    mark = (0.0 if facts.st_mode & 0o022 else facts.st_mtime), name, facts.st_size
    for entry in _entries(name, left):
        inside = entry.stat(follow_symlinks=False)
        if inside.st_uid == facts.st_uid:
            mark = max(mark, (inside.st_mtime, entry.path, inside.st_size))
    return mark
