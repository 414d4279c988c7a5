"""The HTTP endpoint that Prometheus scrapes.

Whoever reaches the address can connect, and no request changes anything. So a page is made once a second at most,
whoever asks, and no thread waits for its reader. A connection has five seconds, and beyond a number of them each new
one takes the place of the oldest: nobody keeps another one out by asking slowly, or by not reading.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

from prometheus_client import CollectorRegistry, generate_latest

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""Most connections at one time."""
PATIENCE_S = 5.0
"""Longest time for one request and its answer."""
FRESH_S = 1.0
"""For so long a page is given to all who ask."""
_LONGEST_REQUEST = 16384
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
"""What every Prometheus reads; https://prometheus.io/docs/instrumenting/exposition_formats."""


class _Page:
    """The newest page, as a whole answer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made_at = -FRESH_S
        self._answer = b""

    def answer(self) -> bytes:
        if time.monotonic() - self._made_at >= FRESH_S:
            self._answer = _answer("200 OK", generate_latest(self._registry))
            self._made_at = time.monotonic()
        return self._answer


class _Client(asyncio.Protocol):
    """One connection: one request, and its answer."""

    def __init__(self, page: _Page, open_ones: dict[_Client, None]) -> None:
        self._page = page
        self._open = open_ones
        self._request = b""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        # A clock of its own: a client that sends a byte now and then is no quicker for it.
        self._end = asyncio.get_running_loop().call_later(PATIENCE_S, transport.abort)
        self._open[self] = None
        if len(self._open) > CONNECTIONS:
            next(iter(self._open)).transport.abort()

    def data_received(self, data: bytes) -> None:
        self._request += data
        if len(self._request) > _LONGEST_REQUEST:
            self.transport.abort()
        elif b"\r\n\r\n" in self._request:
            reads = self._request.startswith(b"GET ")
            self.transport.write(self._page.answer() if reads else _answer("405 Method Not Allowed", b""))
            self.transport.close()  # once all is sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._open.pop(self, None)


def _answer(status: str, content: bytes) -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {_TEXT}\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content


class Endpoint:
    """Serves one registry at the address of `metrics.listen`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._listen = ""
        self._serving: tuple[socket.socket, asyncio.AbstractEventLoop, threading.Thread] | None = None

    @property
    def port(self) -> int | None:
        """The port in use; None while nothing listens."""
        return int(self._serving[0].getsockname()[1]) if self._serving is not None else None

    def listen(self, address: str) -> None:
        """Serve at `address` (HOST:PORT) from now on; empty: serve nothing.

        Does nothing where this endpoint serves there already. Raises OSError where the address cannot be bound.
        """
        if address == self._listen:
            return
        self.close()
        if not address:
            return
        host, _, port = address.rpartition(":")
        six = ":" in host
        listener = socket.create_server(
            (host.strip("[]"), int(port)),
            family=socket.AF_INET6 if six else socket.AF_INET,
            dualstack_ipv6=six and socket.has_dualstack_ipv6(),
        )
        loop = asyncio.new_event_loop()
        page, open_ones = _Page(self._registry), dict[_Client, None]()
        server = loop.run_until_complete(
            loop.create_server(lambda: _Client(page, open_ones), sock=listener, backlog=CONNECTIONS)
        )
        thread = threading.Thread(
            target=_serve, args=(loop, server, open_ones), name="pollux-metrics", daemon=True
        )
        thread.start()
        self._serving, self._listen = (listener, loop, thread), address
        log.info("metrics at http://%s/metrics", address)

    def close(self) -> None:
        if self._serving is not None:
            _, loop, thread = self._serving
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
        self._serving, self._listen = None, ""


def _serve(loop: asyncio.AbstractEventLoop, server: asyncio.Server, open_ones: dict[_Client, None]) -> None:
    loop.run_forever()
    server.close()
    for client in open_ones:
        client.transport.abort()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
