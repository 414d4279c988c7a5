"""Read a trainer's steps off the lines that it prints."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Sequence
from statistics import median

LONGEST = 4096
"""Bytes of a line that are looked at; a longer one costs no more."""
MOST_LINES = 200
"""Newest lines of one read that are looked at: a trainer that prints more than is read would wait for its output."""
FIRST = 2
"""Intervals after a start that do not count: warm-up, and the first batches of data."""
KEPT = 64
"""Newest intervals whose median is the time of a step."""
MOST = 1e12
"""A step from this number on is none."""
LEAP = 1000.0
"""A step number that rises this many times as fast as steps are made begins the count again: it is no progress."""
AGAIN = 0.5
"""A number that falls to this part of the one before begins another count. Ranks that print each theirs, in any order,
and a trainer that goes back to its last checkpoint fall less."""
_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
"""Colours, and the cursor's movements of a progress bar."""


class Steps:
    """Steps and step times of one start of the trainer; thread-safe.

    A number that falls begins another count: of an evaluation if the former one leaps back to where it was, else of an
    epoch or a phase, whose steps are added. So does a first number far below that of the checkpoint.

    Args:
        patterns: tried in order on each line until one matches; only those before it are tried from then on. Their
            first group is the step; groups `done` and `of`, where they have them, say what part of the next one is
            done.
        line: the pattern that matched last in the attempts before.
        begin: steps made up to the checkpoint that this start goes on from, in the unit of `line`.
    """

    def __init__(self, patterns: Sequence[re.Pattern[str]], line: str = "", begin: float = 0.0) -> None:
        known = [pattern.pattern for pattern in patterns]
        self._known = line
        self._patterns = tuple(patterns)[: known.index(line) + 1 if line in known else None]
        self.line = ""
        """The pattern that matches."""
        self.tails: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self.first_at: float | None = None
        """When the first step was printed."""
        self._last_lines = ["", ""]
        """By stream, the newest line of any kind that is not blank."""
        self._begin(begin)

    def _begin(self, begin: float = 0.0) -> None:
        self._times, self._times_aside = deque[float](maxlen=KEPT), deque[float](maxlen=KEPT)
        """Seconds of a step, by each interval; those while another count runs."""
        self._skipped = 0
        self.last: float | None = None
        """The newest number that was printed."""
        self._apart = 0.0
        """Between the two newest of one count."""
        self._before, self._top, self._top_at = begin, 0.0, 0.0
        """Steps made before this count began; its highest number, and the time of that."""
        self._former: tuple[float, float, float] | None = None
        """The same of the count that was left first."""
        self._mark = 0.0, 0.0
        """Number and time from which the next interval is taken."""

    def feed(self, stream: int, data: bytes, now: float) -> None:
        """Take in what the trainer has printed to one of its streams at a POSIX time."""
        with self._lock:
            *whole, tail = re.split(rb"[\r\n]", self.tails.get(stream, b"") + data)
            self.tails[stream] = tail[:LONGEST]
            for line in filter(None, whole[-MOST_LINES:]):
                text = _CONTROL.sub("", line[:LONGEST].decode(errors="replace"))
                self._last_lines[stream] = text.strip() or self._last_lines[stream]
                self._line(text, now)

    @property
    def last_line(self) -> str:
        """The last line for an error's cause: of stderr, as the two streams are read in no order."""
        return self._last_lines[1] or self._last_lines[0]

    def _line(self, line: str, now: float) -> None:
        for index, pattern in enumerate(self._patterns):
            found = pattern.search(line)
            if found is None:
                continue
            try:
                step = float((found[1] or "").replace(",", ""))
                if parts := found.groupdict().get("of"):
                    step += min(float(found["done"]) / float(parts), 1.0)
            except (ValueError, ZeroDivisionError, IndexError, TypeError):
                continue
            if not 0 <= step < MOST:
                continue
            if pattern.pattern != self.line:
                self.line, self._patterns = pattern.pattern, self._patterns[: index + 1]
                self._begin(self._before if pattern.pattern == self._known else 0.0)
            self._step(step, now)
            return

    def _step(self, step: float, now: float) -> None:
        before, self.last = self.last, step
        self.first_at = self.first_at or now
        if before is None:
            begin, self._before = self._before, 0.0
            if step < AGAIN * begin:
                # Or it was printed before the checkpoint was read: then the next one leaps on.
                self._former, self._before = (0.0, begin, now), begin - step
            self._top, self._top_at, self._mark = step, now, (step, now)
            return
        if step <= AGAIN * before:
            self._former = self._former or (self._before, self._top, self._top_at)
            self._before += self._top + self._apart - step
            self._top, self._top_at, self._mark = step, now, (step, now)
            return
        if self._former is not None and step > self._former[1] and step - before > self._apart:
            self._before, self._top, self._top_at = self._former
            self._former = None
            self._times_aside.clear()
            self._mark = step, now
        if step <= self._top:
            return
        steps, usual, elapsed = step - self._top, self._median(), now - self._top_at
        self._top, self._top_at = step, now
        if usual is not None and steps > LEAP * max(elapsed / usual, 1.0):
            self._before -= steps
            self._mark = step, now
            return
        self._apart = steps
        # Lines that come at the same time were kept back: their steps took the time up to the next ones. The clock may
        # have been set back.
        if now < self._mark[1]:
            self._mark = step, now
        elif now > self._mark[1]:
            self._skipped += 1
            if self._skipped > FIRST:
                times = self._times if self._former is None else self._times_aside
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
        """Steps made up to the newest one, those of all counts together."""
        with self._lock:
            return self._before + self._top

    @property
    def seconds(self) -> float | None:
        """Time of a step; None before it is known. A checkpoint or an evaluation between two steps moves no median."""
        with self._lock:
            return self._median()
