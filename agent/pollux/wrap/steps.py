"""Read a trainer's steps off the lines that it prints."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from statistics import median

LONGEST = 4096
"""Bytes of a line that are looked at; a longer one costs no more."""
FIRST = 2
"""Intervals after a start that do not count: warm-up, and the first batches of data."""
KEPT = 64
"""Newest intervals whose median is the time of a step."""
MOST = 1e12
"""A step from this number on is none."""
LEAP = 1000.0
"""A step number that rises this many times as fast as steps are made begins the count again: it is no progress."""
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class Steps:
    """Steps and step times of one start of the trainer; thread-safe.

    Args:
        patterns: tried in order on each line until one matches, which stays. Its first group is the step; groups `done`
            and `of`, where it has them, say what part of the next one is done.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]]) -> None:
        self._patterns = tuple(patterns)
        self.tails: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._intervals: deque[tuple[float, float]] = deque(maxlen=KEPT)
        """Steps, and seconds of each."""
        self._skipped = 0
        self._shift = 0.0
        self._last: tuple[float, float] | None = None
        """Number and time of the newest step."""
        self.first_at: float | None = None
        """When the first step was printed."""
        self.last_line = ""
        """The newest line of any kind that is not blank, for an error's cause."""

    def feed(self, stream: int, data: bytes, now: float) -> None:
        """Take in what the trainer has printed to one of its streams at a POSIX time."""
        with self._lock:
            *whole, tail = re.split(rb"[\r\n]", self.tails.get(stream, b"") + data)
            self.tails[stream] = tail[:LONGEST]
            for line in whole:
                self._line(_COLOUR.sub("", line[:LONGEST].decode(errors="replace")), now)

    def _line(self, line: str, now: float) -> None:
        if line.strip():
            self.last_line = line.strip()
        for pattern in self._patterns:
            found = pattern.search(line)
            if found is None or not found.groups():
                continue
            try:
                step = float((found[1] or "").replace(",", ""))
                if parts := found.groupdict().get("of"):
                    step += min(float(found["done"]) / float(parts), 1.0)
            except (ValueError, ZeroDivisionError, IndexError):
                continue
            if not 0 <= step < MOST:
                continue
            self._patterns = (pattern,)
            self._step(step, now)
            return

    def _step(self, step: float, now: float) -> None:
        if self.first_at is None:
            self.first_at = now
        before, self._last = self._last, (step, now)
        if before is None or step <= before[0] or now <= before[1]:
            return
        steps, seconds = step - before[0], now - before[1]
        usual = self._median()
        if usual is not None and seconds / steps < usual / LEAP:
            self._shift += steps
            return
        self._skipped += 1
        if self._skipped > FIRST:
            self._intervals.append((steps, seconds / steps))

    def forget_times(self) -> None:
        """Measure the time of a step again: a step is another one from now on."""
        with self._lock:
            self._intervals.clear()
            self._skipped = FIRST - 1

    def _median(self) -> float | None:
        return median(seconds for _, seconds in self._intervals) if self._intervals else None

    @property
    def number(self) -> float:
        """The newest step, less what was no progress."""
        with self._lock:
            return 0.0 if self._last is None else self._last[0] - self._shift

    @property
    def seconds(self) -> float | None:
        """Time of a step; None before it is known. A checkpoint or an evaluation between two steps moves no median."""
        with self._lock:
            return self._median()
