"""Carry messages over one connection.

It leads to another launcher, or from rank 0 to its launcher.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator

from pollux.launcher.messages import Message, pack, parse
from pollux.ranks.sealed import Frames, NotAuthentic, keep_alive

SEND_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16


class Channel:
    """A connection over which whole, typed messages come."""

    def __init__(self, connection: socket.socket, node: int, frames: Frames | None = None) -> None:
        """`frames` are the authenticated connection's.

        Without them both ends belong to this process and its child.
        """
        self.node = node
        self.socket = connection
        self.open = True
        self._frames = frames or Frames()
        connection.settimeout(SEND_TIMEOUT_S)
        if connection.family != socket.AF_UNIX:
            keep_alive(connection)

    def send(self, message: Message) -> None:
        """Send a message.

        If the other side is gone, this raises nothing: `receive` reports the end of the connection.
        """
        try:
            self.socket.sendall(self._frames.pack(pack(message)))
        except OSError:
            self.open = False

    def receive(self, timeout: float) -> Message | None:
        """Wait for the next message.

        None where the connection has ended or nothing came.
        """
        deadline = time.monotonic() + timeout
        while (message := self._take()) is None:
            left = deadline - time.monotonic()
            if not self.open or left <= 0 or not self._fill(left):
                return None
        return message

    def pending(self) -> Iterator[Message]:
        """Messages that are here already."""
        while self.open and self._fill(0.0):
            pass
        while (message := self._take()) is not None:
            yield message

    def signal_arrivals(self) -> None:
        """Have this process sent SIGIO when something comes."""
        signal_arrivals(self.socket)

    def close(self) -> None:
        self.open = False
        self.socket.close()

    def _fill(self, timeout: float) -> bool:
        """Read once. False where nothing came in time or the connection has ended."""
        try:
            self.socket.settimeout(timeout)
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, TimeoutError):
            return False
        except OSError:
            data = b""
        finally:
            if self.socket.fileno() >= 0:
                self.socket.settimeout(SEND_TIMEOUT_S)
        if not data:
            self.open = False
            return False
        self._frames.feed(data)
        return True

    def _take(self) -> Message | None:
        while True:
            try:
                text = self._frames.take()
            except NotAuthentic:
                self.open = False
                return None
            if text is None:
                return None
            try:
                return parse(text)
            except ValueError:
                # The connection is authenticated, so this is another version of this program: exit statuses suffice.
                continue


def signal_arrivals(connection: socket.socket) -> None:
    """Have the kernel send this process SIGIO when something comes.

    Fcntl(2), F_SETOWN, O_ASYNC.
    """
    fcntl.fcntl(connection, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(connection, fcntl.F_GETFL)
    fcntl.fcntl(connection, fcntl.F_SETFL, flags | os.O_ASYNC)
