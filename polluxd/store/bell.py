"""A pause that a signal handler may end."""

from __future__ import annotations

import contextlib
import os
import select


class Bell:
    """A pipe rather than an Event.

    A handler that takes a lock of the thread that it interrupts never returns.
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        os.set_blocking(self._out, False)
        os.set_blocking(self._in, False)

    def ring(self) -> None:
        """End a wait now. Safe in a signal handler and in any thread."""
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._in, b"!")

    def wait(self, timeout_s: float) -> bool:
        """Wait for the bell; True where it rang."""
        if not select.select([self._out], [], [], max(0.0, timeout_s))[0]:
            return False
        with contextlib.suppress(BlockingIOError):
            os.read(self._out, 4096)
        return True

    def close(self) -> None:
        for end in (self._out, self._in):
            with contextlib.suppress(OSError):
                os.close(end)
