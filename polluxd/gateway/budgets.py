"""What one client, by name, and one user may use of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from .http_errors import too_often

_MOST_KEYS = 100_000


class Budget:
    """So many a second for each key, and so many at once after a rest.

    Not for several threads.
    """

    def __init__(self, per_second: float, at_once: float) -> None:
        self._per_second = per_second
        self._at_once = at_once
        self._left: dict[Hashable, tuple[float, float]] = {}

    def take(self, key: Hashable) -> bool:
        """Spend one; False where nothing is left."""
        now = time.monotonic()
        left, at = self._left.get(key, (self._at_once, now))
        left = min(self._at_once, left + (now - at) * self._per_second)
        if left < 1:
            return False
        self._left[key] = (left - 1, now)
        if len(self._left) > _MOST_KEYS:
            self._forget(now)
        return True

    def _forget(self, now: float) -> None:
        """Forget the keys that have rested."""
        rest = self._at_once / self._per_second
        self._left = {key: spent for key, spent in self._left.items() if now - spent[1] < rest}


class Pace:
    """So many requests a second of each name or user, the others in line.

    Args:
        at_once: requests that wait for nothing after a rest.
        longest_s: longest wait; beyond it a request is refused.
    """

    def __init__(self, per_second: float, at_once: float, longest_s: float) -> None:
        self._each_s, self._rest_s, self._longest_s = 1 / per_second, at_once / per_second, longest_s
        self._due: dict[Hashable, float] = {}

    async def wait(self, name: Hashable) -> None:
        """Wait in line. Raises HttpRefusal where the line is long."""
        now = time.monotonic()
        due = max(self._due.get(name, 0.0), now - self._rest_s) + self._each_s
        if due > now + self._longest_s:
            raise too_often("you send too many requests: wait for their answers")
        self._due[name] = due
        if len(self._due) > _MOST_KEYS:
            self._due = {key: at for key, at in self._due.items() if at > now - self._rest_s}
        if due > now:
            await asyncio.sleep(due - now)


class Turns:
    """At most so many requests of one user, or name, under way.

    Further ones wait in line.

    Args:
        under_way: for each key.
        in_line: for each key, those under way included; beyond it a request is refused.
    """

    def __init__(self, under_way: int, in_line: int) -> None:
        self._under_way = under_way
        self._in_line = in_line
        self._lines: dict[Hashable, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, key: Hashable) -> AsyncIterator[None]:
        """Wait for a turn. Raises Refused where too many wait."""
        gate, count = self._lines.get(key) or (asyncio.Semaphore(self._under_way), 0)
        if count >= self._in_line:
            raise too_often(f"{count} of your requests are under way: wait for their answers")
        self._lines[key] = gate, count + 1
        try:
            async with gate:
                yield
        finally:
            gate, count = self._lines[key]
            if count == 1:
                del self._lines[key]
            else:
                self._lines[key] = gate, count - 1
