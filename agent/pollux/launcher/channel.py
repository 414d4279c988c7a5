"""Carry messages over one connection: to another launcher, or between rank 0 and its launcher."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator

from pollux.launcher.messages import Message, pack, parse
from pollux.ranks.links import Link


class Channel:
    """A connection over which whole, typed messages come."""

    def __init__(self, link: Link, node: int = 0) -> None:
        """`node` is the other launcher's."""
        self.node, self.link = node, link
        self.open = True

    def send(self, message: Message) -> None:
        """Send a message.

        If the other side is gone, this raises nothing: `receive` reports the end of the connection.
        """
        try:
            self.link.send(pack(message))
        except OSError:
            self.open = False

    def receive(self, timeout: float) -> Message | None:
        """Wait for the next message. None where the connection has ended or nothing came."""
        deadline = time.monotonic() + timeout
        while self.open:
            try:
                return parse(self.link.receive(max(deadline - time.monotonic(), 0.0)))
            except TimeoutError:
                return None
            except OSError:
                self.open = False
            except ValueError:
                # The connection is authenticated, so this is another version of this program: exit statuses suffice.
                continue
        return None

    def pending(self) -> Iterator[Message]:
        """Messages that are here already."""
        while (message := self.receive(0.0)) is not None:
            yield message

    def close(self) -> None:
        self.open = False
        self.link.close()


def signal_arrivals(link: Link) -> None:
    """Have the kernel send this process SIGIO when something comes. See fcntl(2): F_SETOWN, O_ASYNC."""
    fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(link, fcntl.F_GETFL)
    fcntl.fcntl(link, fcntl.F_SETFL, flags | os.O_ASYNC)
