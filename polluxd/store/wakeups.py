"""Waiting for a NOTIFY, which cuts a pause short.

polluxd does not depend on notifications: polling alone is enough.

Any user may send NOTIFY. A notification therefore only makes polluxd ask its database whether a move under way has
heard from its job, at most every `FLOOR_S` seconds. The pause ends only if it has.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable
from typing import Any

import psycopg2

from .connection import Connector

FLOOR_S = 0.2
"""Least time between two questions that notifications cause."""


class Wakeups:
    """LISTEN on channel `pollux`, and a bell that a signal handler may ring.

    Args:
        news: asks whether something has arrived that polluxd waits for; True ends a wait. Must not raise.
    """

    def __init__(self, connector: Connector, news: Callable[[], bool]) -> None:
        self._connector = connector
        self._news = news
        self._asked_at = float("-inf")
        self._connection: Any = None
        self._bell_out, self._bell_in = os.pipe()
        os.set_blocking(self._bell_out, False)
        os.set_blocking(self._bell_in, False)

    def ring(self) -> None:
        """End a wait now. Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._bell_in, b"!")

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` seconds for news or the bell.

        Returns True when news or the bell ended the wait. Raises no psycopg2.Error.
        """
        deadline = time.monotonic() + timeout_s
        asking = self._listen()  # a notification from before is lost
        while True:
            now = time.monotonic()
            if self._connection is not None:
                asking |= self._take_notifies()
            if asking and now >= self._asked_at + FLOOR_S:
                asking, self._asked_at = False, now
                if self._news():
                    return True
            until = min(deadline, self._asked_at + FLOOR_S) if asking else deadline
            if now >= deadline:
                return False
            watched: list[Any] = [self._bell_out]
            if self._connection is not None and not asking:
                watched.append(self._connection)
            readable, _, _ = select.select(watched, [], [], max(0.0, until - time.monotonic()))
            if self._bell_out in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell_out, 4096)
                return True

    def close(self) -> None:
        self._drop()
        for end in (self._bell_out, self._bell_in):
            with contextlib.suppress(OSError):
                os.close(end)

    def _listen(self) -> bool:
        """Listen unless this process does already; True when it begins to."""
        if self._connection is not None:
            return False
        try:
            self._connection = self._connector.open()
            self._connection.autocommit = True
            with self._connection.cursor() as cursor:
                cursor.execute("LISTEN pollux")
        except psycopg2.Error:
            self._drop()
            return False
        return True

    def _take_notifies(self) -> bool:
        try:
            self._connection.poll()
        except psycopg2.Error:
            self._drop()
            return False
        came = bool(self._connection.notifies)
        self._connection.notifies.clear()
        return came

    def _drop(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg2.Error):
                self._connection.close()
            self._connection = None
