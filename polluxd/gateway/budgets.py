"""What one address and one user may use of the gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from .refusals import too_often

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

    def give_back(self, key: Hashable) -> None:
        if key in self._left:
            left, at = self._left[key]
            self._left[key] = (left + 1, at)

    def _forget(self, now: float) -> None:
        """Forget the keys that have rested."""
        rest = self._at_once / self._per_second
        self._left = {key: spent for key, spent in self._left.items() if now - spent[1] < rest}


class Turns:
    """At most so many requests of one user under way; further ones wait in line, and beyond that are refused.

    Args:
        under_way: of one user.
        in_line: of one user, those under way included.
    """

    def __init__(self, under_way: int, in_line: int) -> None:
        self._under_way = under_way
        self._in_line = in_line
        self._users: dict[int, tuple[asyncio.Semaphore, int]] = {}

    @asynccontextmanager
    async def turn(self, uid: int) -> AsyncIterator[None]:
        """Wait for the user's turn. Raises Refused where too many wait."""
        gate, count = self._users.get(uid) or (asyncio.Semaphore(self._under_way), 0)
        if count >= self._in_line:
            raise too_often(f"you have {count} requests under way: wait for their answers")
        self._users[uid] = gate, count + 1
        try:
            async with gate:
                yield
        finally:
            gate, count = self._users[uid]
            if count == 1:
                del self._users[uid]
            else:
                self._users[uid] = gate, count - 1
