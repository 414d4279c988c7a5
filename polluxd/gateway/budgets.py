"""What one address and one user may use of the gateway."""

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

    def spent(self, key: Hashable) -> bool:
        """Tell whether nothing is left."""
        left, at = self._left.get(key, (self._at_once, 0.0))
        return left + (time.monotonic() - at) * self._per_second < 1

    def _forget(self, now: float) -> None:
        """Forget the keys that have rested."""
        rest = self._at_once / self._per_second
        self._left = {key: spent for key, spent in self._left.items() if now - spent[1] < rest}


class Turns:
    """At most so many requests of one user, or address, under way.

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
