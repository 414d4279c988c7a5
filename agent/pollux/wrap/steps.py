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
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours, and the cursor's movements of a progress bar."""


class Steps:
    """Steps and step times of one start of the trainer; thread-safe.

    A number that falls begins another count: of an evaluation if the former one goes on later, else of an epoch.

    Args:
        patterns: tried in order on each line until one matches; only those before it are tried from then on. Their
            first group is the step; groups `done` and `of`, where they have them, say what part of the next one is
            done.
        line: the pattern that matched last in the attempts before.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]], line: str = "") -> None:
        known = [pattern.pattern for pattern in patterns]
        self._patterns = tuple(patterns)[: known.index(line) + 1 if line in known else None]
        self.line = ""
        """The pattern that matches."""
        self.tails: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.first_at: float | None = None
        """When the first step was printed."""
        self.last_line = ""
        """The newest line of any kind that is not blank, for an error's cause."""
        self._begin()

    def _begin(self) -> None:
        self._times, self._times_aside = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        """Seconds of a step, by each interval; those while another count runs."""
        self._skipped = 0
        self._last: float | None = None
        """The newest number."""
        self._top = self._top_at = 0.0
        """The highest number, and its time."""
        self._mark = 0.0, 0.0
        """Number and time from which the next interval is taken."""
        self._number = self._aside = 0.0
        """Steps made, and those of a count that began since the highest number."""

    def feed(self, stream: int, data: bytes, now: float) -> None:
        """Take in what the trainer has printed to one of its streams at a POSIX time."""
        with self._lock:
            *whole, tail = re.split(rb"[\r\n]", self.tails.get(stream, b"") + data)
            self.tails[stream] = tail[:LONGEST]
            for line in whole:
                self._line(_CONTROL.sub("", line[:LONGEST].decode(errors="replace")), now)

    def _line(self, line: str, now: float) -> None:
        if line.strip():
            self.last_line = line.strip()
        for index, pattern in enumerate(self._patterns):
            found = pattern.search(line)
            if found is None:
                continue
            try:
                step = float((found[1] or "").replace(",", ""))
                if parts := found.groupdict().get("of"):
                    step += min(float(found["done"]) / float(parts), 1.0)
            except (ValueError, ZeroDivisionError, IndexError):
                continue
            if not 0 <= step < MOST:
                continue
            if pattern.pattern != self.line:
                self.line, self._patterns = pattern.pattern, self._patterns[: index + 1]
                self._begin()
            self._step(step, now)
            return

    def _step(self, step: float, now: float) -> None:
        self.first_at = self.first_at or now
        before, self._last = self._last, step
        if before is None:
            self._number, self._top, self._top_at, self._mark = step, step, now, (step, now)
            return
        times = self._times
        if step > self._top:
            steps, usual, elapsed = step - self._top, self._median(), now - self._top_at
            resumed, self._top, self._top_at, self._aside = before < self._top, step, now, 0.0
            leapt = usual is not None and steps > LEAP * max(elapsed / usual, 1.0)
            self._number += 0.0 if leapt else steps
            if leapt or resumed:
                self._mark = step, now
                self._times_aside.clear()
                return
        elif step > before:
            self._aside += step - before
            times = self._times_aside
        else:
            self._mark = step, now
            return
        # Lines that come at the same time were kept back: their steps took the time up to the next ones.
        if now > self._mark[1]:
            self._skipped += 1
            if self._skipped > FIRST:
                times.append((now - self._mark[1]) / (step - self._mark[0]))
            self._mark = step, now

    def forget_times(self) -> None:
        """Measure the time of a step again: a step is another one from now on."""
        with self._lock:
            self._times.clear()
            self._times_aside.clear()
            self._skipped = FIRST - 1

    def _median(self) -> float | None:
        times = self._times or self._times_aside
        return median(times) if times else None

    @property
    def number(self) -> float:
        """The newest step, less what was no progress."""
        with self._lock:
            return self._number + self._aside

    @property
    def seconds(self) -> float | None:
        """Time of a step; None before it is known. A checkpoint or an evaluation between two steps moves no median."""
        with self._lock:
            return self._median()
