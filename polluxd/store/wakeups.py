"""Waiting for a NOTIFY: a wake-up only, polling is what is relied on."""

from __future__ import annotations

import contextlib
import os
import select
import time
from typing import Any

import psycopg2

from .connection import Connector


class Wakeups:
    """LISTEN on channel `pollux`, and a bell that a signal handler may ring."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector
        self._connection: Any = None
        self._bell_out, self._bell_in = os.pipe()
        os.set_blocking(self._bell_out, False)
        os.set_blocking(self._bell_in, False)

    def ring(self) -> None:
        """End a wait now. Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._bell_in, b"!")

    def wait(self, timeout_s: float) -> bool:
        """True when something was notified (or the bell rung) within `timeout_s` seconds. Never raises for
        the database's sake: without one it just waits."""
        deadline = time.monotonic() + timeout_s
        if self._listen():
            return True  # whatever was notified before we listened is lost: look now
        while True:
            if self._connection is not None and self._take_notifies():
                return True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            watched: list[Any] = [self._bell_out]
            if self._connection is not None:
                watched.append(self._connection)
            readable, _, _ = select.select(watched, [], [], left)
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
        """Listen if we do not yet; True when that is new."""
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
