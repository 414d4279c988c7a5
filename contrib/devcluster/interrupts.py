"""SIGINT, SIGTERM and SIGHUP as an exception, so that a suite stops every server that it started."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(SystemExit):
    """SIGINT, SIGTERM or SIGHUP arrived; the exit status is 128 and its number, as a shell has it.

    Everything that the suite started is stopped while this exception unwinds the stack.
    """

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number).name


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise Interrupted in the main thread at the first signal, and ignore further ones.

    A second signal would cut the clean-up short.
    """

    def on_signal(number: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, on_signal)
    yield
