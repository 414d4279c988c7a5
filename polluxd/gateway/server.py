"""Listen, and let connections in."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polluxd.errors import ConfigError

from .budgets import Pace
from .peers import Peers
from .visitors import Bounds, Visitor, Visitors, uvicorn_config

log = logging.getLogger(__name__)

_BACKLOG = 4096
"""Connections that wait to be accepted: where they are more, the kernel lets them try again a second later."""
_KEPT_BYTES = 131072
_AT_ONCE = 8
"""Connections that are let in before those that are open get their turn."""


class GatewayServer:
    """Serves an ASGI application.

    Args:
        tls: certificate and key in PEM; None: plain HTTP.
        setting: what names the address, for messages.
    """

    def __init__(
        self,
        app: Any,
        tls: tuple[Path, Path] | None = None,
        bounds: Bounds | None = None,
        setting: str = "gateway.listen",
    ) -> None:
        self._setting = setting
        # uvicorn logs each request that is no HTTP.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self.entrance = Visitors(bounds or Bounds())
        self._config = uvicorn_config(app, self.entrance.bounds)
        self._tls = None if tls is None else _context(*tls)
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._peers = Peers()
        self._arrivals = Pace(*self.entrance.bounds.arrivals)

    async def listen(self, address: str, given: Sequence[socket.socket] = ()) -> Sequence[tuple[str, int]]:
        """Listen at HOST:PORT, by `given` sockets where there are some; return where. Raises ConfigError."""
        host, _, port = address.rpartition(":")
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            wanted = dict.fromkeys((each[0], each[4][:2]) for each in found)
            self._listeners = [*given]
            if given and not {each.getsockname()[:2] for each in given} & {where for _, where in wanted}:
                raise ConfigError(
                    f"gateway.listen is {address}, and systemd listens at {given[0].getsockname()[:2]}: name the same "
                    "with `systemctl edit polluxd-gateway.socket`"
                )
            for family, where in () if given else wanted:
                both = where[0] == "::" and socket.has_dualstack_ipv6()
                self._listeners.append(socket.create_server(where, family=family, dualstack_ipv6=both))
        except OSError as error:
            raise ConfigError(
                f"{self._setting} {address}: {error.strerror or error}: name another address"
            ) from None
        for listener in self._listeners:
            listener.listen(_BACKLOG)
            listener.setblocking(False)
            # What the kernel keeps of an answer that nobody reads (socket(7)); connections inherit it.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KEPT_BYTES)
            # The kernel keeps connections that send nothing to itself (tcp(7)).
            listener.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, math.ceil(self.entrance.bounds.request_s)
            )
            self._start(self._let_in(listener))
        return [listener.getsockname()[:2] for listener in self._listeners]

    async def close(self) -> None:
        """Stop listening, and end all connections.

        Clients come again, or go to another gateway.
        """
        for task in list(self._tasks):
            task.cancel()
        for listener in self._listeners:
            listener.close()
        self.entrance.end_all()
        self._peers.close()
        await asyncio.sleep(0)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _let_in(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        count = 0
        while True:
            try:
                # Several in a row: uvloop's sock_accept waits a turn of the loop for each.
                accepted, peer = _accept(listener) or await loop.sock_accept(listener)
            except OSError as error:
                # No descriptor is left.
                log.warning("no connection can be accepted: %s", error.strerror or error)
                self.entrance.end_a_stranger()
                await asyncio.sleep(0.1)
                continue
            name = self._peers.name(accepted, peer)
            if self._arrivals.take(name):
                visitor = Visitor(self.entrance, accepted, name, self._config)
                self.entrance.arrive(visitor)
                self._start(self._connect(visitor, accepted))
            else:
                accepted.close()
            count += 1
            if count % _AT_ONCE == 0:
                await asyncio.sleep(0)

    async def _connect(self, visitor: Visitor, accepted: socket.socket) -> None:
        with contextlib.suppress(OSError):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: visitor,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else self.entrance.bounds.request_s,
            )
        except (OSError, asyncio.CancelledError):
            log.debug("a connection was not made", exc_info=True)
            self.entrance.leave(visitor)
            accepted.close()


def given_by_systemd() -> list[socket.socket]:
    """Return the sockets at which systemd listens for this process (sd_listen_fds(3)).

    Nobody else has the port while it starts again.
    """
    if os.environ.pop("LISTEN_PID", "") != str(os.getpid()):
        return []
    return [socket.socket(fileno=3 + number) for number in range(int(os.environ.pop("LISTEN_FDS", "0")))]


def _accept(listener: socket.socket) -> tuple[socket.socket, Any] | None:
    """Return a connection that waits, and its peer; None where none waits. Raises OSError."""
    try:
        accepted, peer = listener.accept()
    except BlockingIOError:
        return None
    accepted.setblocking(False)
    return accepted, peer


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Raises ConfigError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway.tls_certificate {certificate} and tls_key {key}: {error.strerror or error}: name a PEM file with "
            "the chain, and its key, readable for the gateway's user"
        ) from None
    return context
