"""Connections with bounds of time, bytes and number.

A connection that has not shown a valid token is a stranger. Strangers give way to newer ones, the oldest first; whoever
shows a valid token stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import math
import socket
import sys
import termios
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from .payloads import ErrorAnswer, ErrorDetail
from .records import Holder


@dataclass(frozen=True, slots=True)
class Bounds:
    """What clients may use."""

    request_s: float = 5.0
    """From the first byte of a request, or from the connection, to the last byte of the request."""
    idle_s: float = 75.0
    """Between two requests of a connection that has shown a token."""
    request_bytes: int = 8192
    """Of a request that is not complete, head and body: what it costs grows with its headers."""
    known: int = 8192
    """Connections that have shown a token; beyond it, the user with most of them loses the oldest."""
    strangers: int = 2048
    strangers_of_name: int = 1024
    arrivals: tuple[float, float] = (200.0, 512.0)
    """Of one name, a second, and at once after a rest; more are closed at once, since letting in costs more."""
    unread_bytes: int = 4 * 2**20
    """Of all answers to a user that were not read; beyond it, those of the user's other connections are dropped, until
    half of it is left."""
    of_token: int = 6
    """Connections that show the same token."""


class Visitors:
    """Knows all connections, and ends those that are too many."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._all: set[Visitor] = set()
        self._strangers: OrderedDict[Visitor, None] = OrderedDict()
        self._of_name: dict[str, OrderedDict[Visitor, None]] = {}
        self._of_token: dict[str, OrderedDict[Visitor, None]] = {}
        self._of_user: dict[int, OrderedDict[Visitor, None]] = {}
        self._unread: dict[int, int] = {}
        """Of each user, bytes of answers since the last look at what is unread, and of what was unread then."""

    def __len__(self) -> int:
        return len(self._all)

    def arrive(self, visitor: Visitor) -> None:
        """Let a connection in."""
        if len(self._of_name.get(visitor.name, ())) >= self.bounds.strangers_of_name:
            self._end_oldest(visitor.name)
        elif len(self._strangers) >= self.bounds.strangers:
            self.end_a_stranger()
        self._all.add(visitor)
        self._strangers[visitor] = None
        self._of_name.setdefault(visitor.name, OrderedDict())[visitor] = None

    def end_a_stranger(self) -> None:
        """End the oldest stranger of the name with most of them."""
        if self._of_name:
            self._end_oldest(max(self._of_name, key=lambda name: len(self._of_name[name])))

    def _end_oldest(self, name: str) -> None:
        oldest = next((each for each in self._of_name[name] if not each.checked), None)
        if oldest is not None:
            self.end(oldest)

    def make_room(self, visitor: Visitor, size: int) -> None:
        """Before an answer of `size` bytes to a user, drop other ones that the user has not read, the oldest first."""
        total = size + self._unread.get(visitor.uid, 0)
        if total > self.bounds.unread_bytes:
            # A user may have thousands of connections. They are looked at once in so many bytes, not for each answer.
            others = [
                (each, each.unread()) for each in self._of_user.get(visitor.uid, ()) if each is not visitor
            ]
            total = size + sum(unread for _, unread in others)
            enough = total if total <= self.bounds.unread_bytes else self.bounds.unread_bytes // 2
            for each, unread in others:
                if unread and total > enough:
                    total -= unread
                    self.end(each)
        if visitor.uid in self._of_user:
            self._unread[visitor.uid] = total

    def recognise(self, visitor: Visitor, uid: int, token: str) -> None:
        """A connection has shown a valid token."""
        if visitor not in self._all or visitor.token == token:
            return
        self._forget(visitor)
        visitor.token, visitor.uid = token, uid
        self._of_user.setdefault(uid, OrderedDict())[visitor] = None
        mine = self._of_token.setdefault(token, OrderedDict())
        mine[visitor] = None
        if len(mine) > self.bounds.of_token:
            self.end(next(iter(mine)))
        if len(self) - len(self._strangers) > self.bounds.known:
            most = max(self._of_user, key=lambda uid: len(self._of_user[uid]))
            self.end(next(iter(self._of_user[most])))

    def end(self, visitor: Visitor) -> None:
        self.leave(visitor)
        visitor.hang_up()

    def leave(self, visitor: Visitor) -> None:
        self._all.discard(visitor)
        self._forget(visitor)

    def end_all(self) -> None:
        for visitor in list(self._all):
            self.end(visitor)

    def _forget(self, visitor: Visitor) -> None:
        self._strangers.pop(visitor, None)
        _remove(self._of_name, visitor.name, visitor)
        _remove(self._of_token, visitor.token, visitor)
        _remove(self._of_user, visitor.uid, visitor)
        if visitor.uid not in self._of_user:
            self._unread.pop(visitor.uid, None)


def _remove(groups: dict[Any, OrderedDict[Visitor, None]], key: object, visitor: Visitor) -> None:
    if (group := groups.get(key)) is not None:
        group.pop(visitor, None)
        if not group:
            del groups[key]


class Visitor(HttpToolsProtocol):
    """One connection; TLS may not have taken its socket `accepted` over yet."""

    def __init__(self, entrance: Visitors, accepted: socket.socket, name: str, config: Config) -> None:
        super().__init__(config, _STATE, {"connection": self})
        self.name = name
        """See `Peers`."""
        self.checked = False
        """The credential or token of its request is looked at; an answer ends that."""
        self.token = ""
        self.uid = -1
        self._entrance = entrance
        self._accepted = accepted
        self._bounds = entrance.bounds
        self.timeout_keep_alive = self._bounds.request_s  # type: ignore[assignment]
        self._deadline: asyncio.TimerHandle | None = None
        self._received = 0
        self._reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if self._deadline is None and (self.cycle is None or self.cycle.response_complete):
            self._set_deadline()
        self._received += len(data)
        if self.transport.is_closing():
            return
        if self._received > self._bounds.request_bytes:
            self.send_400_response(f"expected at most {self._bounds.request_bytes} bytes of a request")
        else:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, or too many, and read no more."""
        content = ErrorAnswer(error=ErrorDetail(code="refused", message=msg)).model_dump_json()
        self.transport.write(
            "HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(content)}\r\n\r\n{content}".encode()
        )
        self.transport.close()

    def on_headers_complete(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self.cycle is None or (self.cycle.response_complete and unsent <= _LEAST_READ):
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None
            super().on_headers_complete()
        else:
            # A second request before the answer to the first one was sent: no client of polluxd sends it.
            self.hang_up()

    def on_message_complete(self) -> None:
        self._received = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.cycle.response_complete:
            # A refusal came before the end of the request, which ended the wait for the next one.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._unset_keepalive_if_required()
        self._entrance.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        if self.transport.is_closing():
            # Whoever does not read the answer is not waited for.
            self.loop.call_later(self._bounds.request_s, self.transport.abort)
        super().on_response_complete()
        if self._reading is None:
            self._look_at_reading(math.inf)

    def _look_at_reading(self, before: float) -> None:
        """Hang up on a client that has not read `_LEAST_READ` bytes more of its answer in `request_s`."""
        unread, self._reading = self.unread(), None
        if unread > before - _LEAST_READ:
            self.hang_up()
        elif unread:
            self._reading = self.loop.call_later(self._bounds.request_s, self._look_at_reading, unread)

    def unread(self) -> int:
        """Bytes of answers that the client's kernel has not taken: ours and those of our kernel (tcp(7): SIOCOUTQ)."""
        if self.transport is None or self.transport.is_closing():
            return 0
        kept = bytearray(4)
        try:
            fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, kept)
        except OSError:
            return 0
        return self.transport.get_write_buffer_size() + int.from_bytes(kept, sys.byteorder)

    def timeout_keep_alive_handler(self) -> None:
        self.hang_up()

    def recognise(self, holder: Holder, token: str) -> None:
        """The request has shown a valid token."""
        self.timeout_keep_alive = self._bounds.idle_s  # type: ignore[assignment]
        self._entrance.recognise(self, holder.uid, token)

    def make_room(self, size: int) -> None:
        """An answer of `size` bytes follows."""
        self._entrance.make_room(self, size)

    def hang_up(self) -> None:
        if self.transport is not None:
            self.transport.abort()
        else:
            with contextlib.suppress(OSError):
                self._accepted.shutdown(socket.SHUT_RDWR)

    def _set_deadline(self) -> None:
        self._deadline = self.loop.call_later(self._bounds.request_s, self.hang_up)


_STATE = ServerState()
_LEAST_READ = 65536


def uvicorn_config(app: Any, bounds: Bounds) -> Config:
    """Return uvicorn's configuration.

    It has no proxies, no WebSockets, and no log line for each request.
    """
    config = Config(
        app,
        interface="asgi3",
        http=Visitor,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    config.load()
    return config
