"""Keep the store where ranks meet in a separate process.

The store survives the end of any rank, also of rank 0, so the remaining ranks can meet there after a loss. Node 0's
launcher starts the process before the workers, and ends it after them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
from collections.abc import Callable

from pollux.errors import LaunchError
from pollux.launcher.workers import die_with_parent
from pollux.ranks.value_store import VARIABLE, Server, listen


class StoreProcess:
    """The process, as its launcher knows it."""

    def __init__(self, close: Callable[[], None]) -> None:
        """Start it; `close`, called in it, closes what it inherits.

        Raises LaunchError where no port can be had.
        """
        secret, parent = secrets.token_hex(32), os.getpid()
        try:
            listener = listen()
        except OSError as error:
            raise LaunchError(f"no store can be opened for the ranks to meet in: {error}") from error
        self.environment = {VARIABLE: f"{listener.getsockname()[1]}:{secret}"}
        """By which this node's workers find it."""
        self.pid = os.fork()
        if not self.pid:
            try:
                # Signals stay blocked, as in the launcher: it alone ends this process.
                die_with_parent(parent)
                close()
                Server(secret.encode(), listener).serve()
            finally:
                os._exit(1)
        listener.close()

    def end(self) -> None:
        """End the process; the workers are gone."""
        # The launcher may have collected it already, as it does orphans: its pid may be another process's by now.
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
