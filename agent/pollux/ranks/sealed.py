"""Authenticated messages over TCP.

Frames under HMAC, and the handshake that agrees on their key.

Both sides know a secret key. Each sends a random nonce; HMAC-SHA256 of the key over both nonces is the key of this one
connection. From then on every frame carries the HMAC of its direction, number and text. If a frame was forged,
repeated, reordered, reflected or recorded from another connection, the receiver closes the connection. Frames are
authenticated, not encrypted: anybody who can watch the network can read them.

    client                                  server
    {"nonce": N1}                ->
                                 <-         {"nonce": N2}, sealed "welcome"
    sealed hello                 ->

Frames are lines of text: the HMAC in hexadecimal, once there is a key, then the message. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections import Counter
from collections.abc import Sequence

MAX_FRAME = 1 << 24
MAX_GREETING = 1 << 12
"""Bytes of a frame from a side that has not proved yet that it knows the key."""
HANDSHAKE_S = 10.0
"""Seconds in which a connection has to prove that it knows the key."""
MAX_PENDING = 256
"""Connections that are in their handshake at the same time."""
_TAG = 64  # hexadecimal digits of SHA-256
_WELCOME = b"welcome"


class NotAuthentic(Exception):
    """The other side does not know the key, or does not keep to the format."""


class NoAnswer(Exception):
    """No listener with the key was found. `refused`: nobody listens at all."""

    def __init__(self, why: str, *, refused: bool) -> None:
        super().__init__(why)
        self.refused = refused


class Frames:
    """One connection's messages as bytes.

    `feed` what was received, `take` messages, `pack` those to send.
    """

    def __init__(self, largest: int = MAX_FRAME) -> None:
        self.largest = largest
        """Bytes of a message that is taken."""
        self._received = bytearray()
        self._key = b""
        self._mine = self._theirs = b""
        self._sent = self._taken = 0

    def seal(self, key: bytes, mine: bytes, theirs: bytes) -> None:
        """Authenticate all further frames.

        `mine` and `theirs` name the directions.
        """
        self._key, self._mine, self._theirs = key, mine, theirs

    def feed(self, data: bytes) -> None:
        self._received += data

    def take(self) -> bytes | None:
        """The next message; None where no whole one has come. Raises NotAuthentic."""
        end = self._received.find(b"\n")
        if end > self.largest or (end < 0 and len(self._received) > self.largest):
            raise NotAuthentic(f"a message is longer than {self.largest} bytes")
        if end < 0:
            return None
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        if not self._key:
            return line
        tag, text = line[:_TAG], line[_TAG:]
        if not hmac.compare_digest(tag, self._tag(self._theirs, self._taken, text)):
            raise NotAuthentic("a message was not made with this connection's key")
        self._taken += 1
        return text

    def pack(self, text: bytes) -> bytes:
        """The frame of a message, which holds no newline."""
        if not self._key:
            return text + b"\n"
        tag = self._tag(self._mine, self._sent, text)
        self._sent += 1
        return tag + text + b"\n"

    def _tag(self, direction: bytes, number: int, text: bytes) -> bytes:
        signed = b"%s %d %s" % (direction, number, text)
        return hmac.new(self._key, signed, "sha256").hexdigest().encode()


class ClientHandshake:
    """The connecting side.

    Send `first`, then what `feed` returns, until `done`.
    """

    def __init__(self, key: bytes, purpose: str, hello: bytes) -> None:
        self._key, self._purpose, self._hello = key, purpose, hello
        self._nonce = secrets.token_hex(16)
        self._sealed = False
        self.frames = Frames(MAX_GREETING)
        self.first = self.frames.pack(json.dumps({"nonce": self._nonce}).encode())
        self.done = False

    def feed(self, data: bytes) -> bytes:
        """Take in what came; returns what to send. Raises NotAuthentic."""
        self.frames.feed(data)
        if not self._sealed:
            text = self.frames.take()
            if text is None:
                return b""
            key = _session_key(self._key, self._purpose, self._nonce, _nonce(text))
            self.frames.seal(key, b"client", b"server")
            self._sealed = True
        text = self.frames.take()
        if text is None:
            return b""
        if text != _WELCOME:
            raise NotAuthentic("expected a welcome")
        self.done = True
        self.frames.largest = MAX_FRAME
        return self.frames.pack(self._hello)


class ServerHandshake:
    """The listening side: send what `feed` returns, until `hello` is there."""

    def __init__(self, key: bytes, purpose: str) -> None:
        self._key, self._purpose = key, purpose
        self._sealed = False
        self.frames = Frames(MAX_GREETING)
        self.hello: bytes | None = None
        """What the client says of itself, authenticated."""

    def feed(self, data: bytes) -> bytes:
        """Take in what came; returns what to send. Raises NotAuthentic."""
        self.frames.feed(data)
        answer = b""
        if not self._sealed:
            text = self.frames.take()
            if text is None:
                return b""
            nonce = secrets.token_hex(16)
            answer = self.frames.pack(json.dumps({"nonce": nonce}).encode())
            key = _session_key(self._key, self._purpose, _nonce(text), nonce)
            self.frames.seal(key, b"server", b"client")
            self._sealed = True
            answer += self.frames.pack(_WELCOME)
        self.hello = self.frames.take()
        if self.hello is not None:
            # A client that has proved itself may send more than a stranger.
            self.frames.largest = MAX_FRAME
        return answer


class Entrance:
    """Listens, and authenticates many connections at the same time.

    A slow stranger delays no other connection. A connection has `handshake_s` seconds to prove that it knows the key.
    At most `max_pending` connections are in their handshake.
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        purpose: str,
        *,
        handshake_s: float = HANDSHAKE_S,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self._listener, self._key, self._purpose = listener, key, purpose
        self._handshake_s, self._max_pending = handshake_s, max_pending
        self._selector = selectors.DefaultSelector()
        self._pending: dict[socket.socket, tuple[ServerHandshake, float, str]] = {}
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def waiting(self) -> bool:
        """Connections are in their handshake."""
        return bool(self._pending)

    def fileno(self) -> int:
        """Readable where `admitted` has something to do. epoll(7)."""
        return self._selector.fileno()

    def admitted(self, timeout: float) -> list[tuple[socket.socket, Frames, bytes]]:
        """Wait at most `timeout` seconds.

        Returns connections that have proved themselves: (socket, frames, hello).
        """
        found = []
        for key, _ in self._selector.select(max(timeout, 0.0)):
            if key.fileobj is self._listener:
                self._accept()
                continue
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            if connection not in self._pending:
                continue  # dropped by now
            handshake = self._pending[connection][0]
            if not _advance(connection, handshake):
                self._drop(connection)
            elif handshake.hello is not None:
                self._forget(connection)
                found.append((connection, handshake.frames, handshake.hello))
        now = time.monotonic()
        for connection, (_, since, _) in list(self._pending.items()):
            if now - since > self._handshake_s:
                self._drop(connection)
        return found

    def close(self) -> None:
        for connection in list(self._pending):
            self._drop(connection)
        self._selector.close()
        self._listener.close()

    def _accept(self) -> None:
        try:
            connection, address = self._listener.accept()
        except OSError:
            # Out of descriptors, or the client is gone already.
            self._thin_out()
            return
        connection.setblocking(False)
        self._pending[connection] = (
            ServerHandshake(self._key, self._purpose),
            time.monotonic(),
            str(address[0]),
        )
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._pending) > self._max_pending:
            self._thin_out()

    def _thin_out(self) -> None:
        """Drop the oldest connection from the address that holds most.

        A flood displaces its own.
        """
        held = Counter(address for _, _, address in self._pending.values())
        if held:
            busiest = held.most_common(1)[0][0]
            self._drop(next(c for c, (_, _, address) in self._pending.items() if address == busiest))

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._pending[connection]

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()


def connect(
    address: str, ports: Sequence[int], key: bytes, purpose: str, hello: bytes, timeout: float = HANDSHAKE_S
) -> tuple[socket.socket, Frames]:
    """Connect to the one of several ports whose listener knows the key.

    Tries all ports at the same time. Raises NoAnswer.
    """
    deadline = time.monotonic() + min(timeout, HANDSHAKE_S)
    troubles: dict[int, str] = {}
    connections = [socket.socket() for _ in ports]
    made: socket.socket | None = None
    try:
        with selectors.DefaultSelector() as selector:
            for port, connection in zip(ports, connections, strict=True):
                connection.setblocking(False)
                connection.connect_ex((address, port))
                trial = (port, ClientHandshake(key, purpose, hello))
                selector.register(connection, selectors.EVENT_WRITE, trial)
            while made is None and selector.get_map() and (left := deadline - time.monotonic()) > 0:
                for chosen, _ in selector.select(left):
                    why = _connect_further(chosen, selector)
                    port, handshake = chosen.data
                    if why is not None:
                        selector.unregister(chosen.fileobj)
                        troubles[port] = why
                    elif handshake.done:
                        made = connections[ports.index(port)]
                        return made, handshake.frames
            troubles |= {left.data[0]: "it did not answer" for left in selector.get_map().values()}
    except OSError as error:  # a name that cannot be resolved
        raise NoAnswer(str(error), refused=False) from error
    finally:
        for connection in connections:
            if connection is not made:
                connection.close()
    refused = all("refused" in why for why in troubles.values())
    # An answer of a listener says more than a refused connection.
    port = next((port for port, why in troubles.items() if "refused" not in why), ports[0])
    raise NoAnswer(f"port {port}: {troubles[port]}", refused=refused)


def keep_alive(connection: socket.socket) -> None:
    """Send messages at once, and notice when the other node vanishes.

    A node that is gone is noticed within half a minute. tcp(7).
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _connect_further(chosen: selectors.SelectorKey, selector: selectors.BaseSelector) -> str | None:
    """The next step of a connection that is being made.

    Returns why it came to an end.
    """
    connection, (_, handshake) = chosen.fileobj, chosen.data
    assert isinstance(connection, socket.socket)
    if chosen.events & selectors.EVENT_READ:
        return None if _advance(connection, handshake) else "its listener is not this job's"
    error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if error:
        return os.strerror(error)
    selector.modify(connection, selectors.EVENT_READ, chosen.data)
    with contextlib.suppress(OSError):  # the next read tells
        connection.send(handshake.first)
    return None


def _advance(connection: socket.socket, handshake: ClientHandshake | ServerHandshake) -> bool:
    """Read what is there and answer it.

    False where the other side is not authentic, or gone.
    """
    try:
        data = connection.recv(MAX_GREETING)
        if not data:
            return False
        answer = handshake.feed(data)
        # A few hundred bytes fit into the empty buffer of a new connection.
        return not answer or connection.send(answer) == len(answer)
    except BlockingIOError:
        return True
    except (OSError, NotAuthentic):
        return False


def _session_key(key: bytes, purpose: str, client: str, server: str) -> bytes:
    return hmac.digest(key, f"pollux {purpose} {client} {server}".encode(), "sha256")


def _nonce(text: bytes) -> str:
    """Raises NotAuthentic."""
    try:
        match json.loads(text):
            case {"nonce": str(nonce)} if len(nonce) == 32 and nonce.isascii() and nonce.isalnum():
                return nonce
    except (ValueError, RecursionError):
        pass
    raise NotAuthentic("expected a nonce")
