"""What one client, by name, and one user may use of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from .http_errors import too_often

_MOST_KEYS = 100_000


class Pace:
    """So many a second of each name or user, and so many at once after a rest.

    Not for several threads.

    Args:
        longest_s: so long further ones may wait in line; beyond it they are refused.
    """

    def __init__(self, per_second: float, at_once: float, longest_s: float = 0.0) -> None:
        self._each_s, self._rest_s, self._longest_s = 1 / per_second, at_once / per_second, longest_s
        self._due: dict[Hashable, float] = {}

    def take(self, key: Hashable) -> bool:
        """Spend one, without a wait; False where nothing is left."""
        return self._turn_in(key) is not None

    async def wait(self, key: Hashable) -> None:
        """Wait in line. Raises HttpRefusal where the line is long."""
        seconds = self._turn_in(key)
        if seconds is None:
            raise too_often("you send too many requests: wait for their answers")
        if seconds > 0:
            await asyncio.sleep(seconds)

    def _turn_in(self, key: Hashable) -> float | None:
        """Return the seconds until the turn that this spends; None where the line is too long."""
        now = time.monotonic()
        due = max(self._due.get(key, 0.0), now - self._rest_s) + self._each_s
        if due > now + self._longest_s + 1e-6:
            return None
        self._due[key] = due
        if len(self._due) > _MOST_KEYS:
            self._due = {other: at for other, at in self._due.items() if at > now - self._rest_s}
        return due - now


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
