"""Authenticated connections over TCP.

Both sides know a secret key. Each sends a random nonce. HMAC-SHA256 of the key over both nonces is the key of this one
connection. From then on each message carries the HMAC of its direction, number and text. If a message was forged,
repeated, reordered, reflected or recorded from another connection, the receiver closes the connection. Messages are
authenticated, not encrypted: anybody who can watch the network can read them.

    client                                  server
    nonce                        ->
                                 <-         nonce, "welcome" under HMAC
    hello under HMAC             ->

Python's `multiprocessing.connection` cuts the stream into messages. Nothing here imports torch or unpickles a byte.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

MAX_MESSAGE = 1 << 24
MAX_GREETING = 1 << 12
"""Bytes of a message from a side that has not proved yet that it knows the key."""
HANDSHAKE_S = 10.0
"""Seconds in which a connection has to prove that it knows the key."""
MAX_PENDING = 256
"""Connections that are in their handshake at the same time."""
ARRIVALS = 200.0, 512.0
"""Connections that are taken a second, and at once after a rest: each costs the process 0.1 ms of CPU that the training
lacks, and whoever makes it a quarter of that."""
STALL_S = 10
"""Seconds in which a message that has begun has to go on."""
_OPTIONS = {socket.TCP_NODELAY: 1, socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
"""Send messages at once, and notice within half a minute when the other node vanishes. tcp(7)."""
RANKS, LAUNCHERS = "ranks", "launchers"
"""Purposes of connections: a key is another one for each."""
_NONCE = 32
_WELCOME = b"welcome"


class NotAuthentic(OSError):
    """The other side does not know the key, or does not keep to the format."""


class NoAnswer(Exception):
    """No listener with the key was found. `refused`: nobody listens at all."""

    def __init__(self, why: str, *, refused: bool) -> None:
        super().__init__(why)
        self.refused = refused


class Link:
    """One connection. All methods raise OSError where it has ended, and NotAuthentic, which is one."""

    def __init__(self, connection: socket.socket) -> None:
        """Take over a connected socket, without a handshake so far."""
        self.here = ""
        """This side's address."""
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", STALL_S, 0))
        if connection.family != socket.AF_UNIX:
            self.here = str(connection.getsockname()[0])
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _OPTIONS.items():
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = Connection(connection.detach())
        self._key = self._mine = self._theirs = b""
        self._sent = self._taken = 0
        self._largest = MAX_MESSAGE

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        self._connection.close()

    def end(self) -> None:
        """End the connection; whoever waits on it, in any thread, sees its end."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as connection:
            connection.shutdown(socket.SHUT_RDWR)

    def send(self, text: bytes) -> None:
        if self._key:
            text = self._tag(self._mine, self._sent, text) + text
            self._sent += 1
        self._connection.send_bytes(text)

    def receive(self, timeout: float | None = None) -> bytes:
        """The next message. Raises TimeoutError where none begins within `timeout` seconds (None: ever)."""
        try:
            if not self._connection.poll(timeout):
                raise TimeoutError(f"no message came within {timeout:g} s")
            raw = self._connection.recv_bytes(self._largest)
        except EOFError:
            raise ConnectionResetError("the other side has ended the connection") from None
        if not self._key:
            return raw
        text = raw[_NONCE:]
        if not hmac.compare_digest(raw[:_NONCE], self._tag(self._theirs, self._taken, text)):
            raise NotAuthentic("a message was not made with this connection's key")
        self._taken += 1
        return text

    def greet(self, key: bytes, purpose: str, hello: bytes, timeout: float) -> None:
        """The connecting side's handshake."""
        nonce = secrets.token_bytes(_NONCE)
        self.send(nonce)
        self._seal(key, purpose, nonce, self.receive(timeout), (b"client", b"server"))
        if self.receive(timeout) != _WELCOME:
            raise NotAuthentic("expected a welcome")
        self.send(hello)

    def welcome(self, key: bytes, purpose: str) -> bytes:
        """The listening side's handshake; returns the client's hello."""
        self._largest = MAX_GREETING
        theirs, nonce = self.receive(), secrets.token_bytes(_NONCE)
        self.send(nonce)
        self._seal(key, purpose, theirs, nonce, (b"server", b"client"))
        self.send(_WELCOME)
        hello = self.receive()
        self._largest = MAX_MESSAGE
        return hello

    def _seal(
        self, key: bytes, purpose: str, client: bytes, server: bytes, ends: tuple[bytes, bytes]
    ) -> None:
        if len(client) != _NONCE or len(server) != _NONCE:
            raise NotAuthentic("expected a nonce")
        self._key = hmac.digest(key, b"pollux %s " % purpose.encode() + client + server, "sha256")
        self._mine, self._theirs = ends

    def _tag(self, direction: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self._key, b"%s %d %s" % (direction, number, text), "sha256")


class Door:
    """Listens, and authenticates each connection in a thread of its own.

    A slow stranger delays no other connection. A connection has `handshake_s` seconds to prove that it knows the key.
    At most `max_pending` connections are in their handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        purpose: str,
        admit: Callable[[Link, bytes], None],
        *,
        handshake_s: float = HANDSHAKE_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """`admit` gets each connection that has proved itself, and its hello, in the connection's thread."""
        self._listener, self._key, self._purpose, self._admit = listener, key, purpose, admit
        self._handshake_s, self._max_pending = handshake_s, max_pending
        self._pending: dict[Link, tuple[str, float]] = {}
        self._changing = threading.Lock()
        self._closed = False
        self._left, self._taken_at = ARRIVALS[1], time.monotonic()
        self._threads: set[threading.Thread] = set()
        self._thread = threading.Thread(target=self._listen, name="pollux-door", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and wait for the threads of connections that have not been admitted."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._changing:
            for link in self._pending:
                link.end()
        for thread in list(self._threads):
            thread.join()

    def _listen(self) -> None:
        while not self._closed:
            # A stranger who stays silent is dropped in time.
            self._listener.settimeout(1.0 if self._pending else None)
            try:
                connection, address = self._listener.accept()
                link = Link(connection)
            except TimeoutError:
                self._thin_out()
                continue
            except OSError:
                if not self._closed:  # out of descriptors, or the client is gone already
                    time.sleep(0.01)
                    self._thin_out(at_most=len(self._pending) - 1)
                continue
            with self._changing:
                self._pending[link] = (str(address[0]), time.monotonic())
            self._thin_out(at_most=self._max_pending)
            self._pace()
            thread = threading.Thread(target=self._welcome, args=(link,), name="pollux-link", daemon=True)
            self._threads.add(thread)
            thread.start()

    def _pace(self) -> None:
        """Wait where connections come one after another without end."""
        now = time.monotonic()
        per_second, at_once = ARRIVALS
        self._left = min(at_once, self._left + (now - self._taken_at) * per_second) - 1.0
        self._taken_at = now
        if self._left < 0.0:
            time.sleep(-self._left / per_second)

    def _welcome(self, link: Link) -> None:
        hello = None
        try:
            hello = link.welcome(self._key, self._purpose)
        except OSError:
            pass
        finally:
            with self._changing:
                self._pending.pop(link, None)
                if hello is None:
                    link.close()
        try:
            if hello is not None:
                self._admit(link, hello)
        finally:
            self._threads.discard(threading.current_thread())

    def _thin_out(self, at_most: int = MAX_PENDING) -> None:
        """Drop who has taken too long, and the oldest from the address that holds most: a flood displaces its own."""
        with self._changing:
            since = time.monotonic() - self._handshake_s
            late = [link for link, (_, began) in self._pending.items() if began < since]
            if not late and len(self._pending) > max(at_most, 0):
                busiest = Counter(address for address, _ in self._pending.values()).most_common(1)[0][0]
                late = [next(link for link, (address, _) in self._pending.items() if address == busiest)]
            for link in late:
                del self._pending[link]
                link.end()


def connect(
    address: str,
    ports: Sequence[int],
    key: bytes,
    purpose: str,
    hello: bytes,
    timeout: float = HANDSHAKE_S,
) -> Link:
    """Connect to the first of the ports where a listener knows the key; each has `timeout` seconds. Raises NoAnswer."""
    troubles: dict[int, OSError] = {}
    for port in ports:
        try:
            link = Link(socket.create_connection((address, port), timeout))
            try:
                link.greet(key, purpose, hello, timeout)
            except BaseException:
                link.close()
                raise
            return link
        except OSError as error:
            troubles[port] = error
    # An answer of a listener says more than a refused connection.
    refused = [isinstance(error, ConnectionRefusedError) for error in troubles.values()]
    port = next((port for port, no in zip(ports, refused, strict=True) if not no), ports[0])
    why = troubles[port]
    if isinstance(why, NotAuthentic | ConnectionResetError):
        raise NoAnswer(f"port {port}: its listener is not this job's", refused=False) from why
    raise NoAnswer(f"port {port}: {why.strerror or why}", refused=all(refused)) from why


def reach(
    address: str,
    ports: Sequence[int],
    key: bytes,
    purpose: str,
    patience: float,
    hello: bytes = b"{}",
    *,
    insists: bool = False,
) -> Link:
    """Connect as `connect` does, and try again for `patience` seconds.

    A refused connection ends it, unless this side `insists`: the listener is still to come. Raises NoAnswer.
    """
    deadline, pause = time.monotonic() + patience, 0.02
    while True:
        try:
            left = deadline - time.monotonic()
            return connect(address, ports, key, purpose, hello, min(max(left, 0.1), HANDSHAKE_S))
        except NoAnswer as error:
            left = deadline - time.monotonic()
            if left <= 0 or (error.refused and not insists):
                raise
        time.sleep(min(pause, left))
        pause = min(pause * 2, 1.0)
