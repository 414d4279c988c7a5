"""The HTTP endpoint that Prometheus scrapes: the gateway's server, with one page.

Whoever reaches the address can connect, and no request changes anything. A page is made once a second at most, whoever
asks.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from polluxd.errors import ConfigError
from polluxd.gateway.server import GatewayServer
from polluxd.gateway.visitors import Bounds

log = logging.getLogger(__name__)

CONNECTIONS = 256
"""Most connections at one time: all are strangers, and the oldest gives way."""
FRESH_S = 1.0
"""For so long a page is given to all who ask."""
_TEXT = b"text/plain; version=0.0.4; charset=utf-8"
"""What every Prometheus reads; https://prometheus.io/docs/instrumenting/exposition_formats."""


class _Page:
    """The ASGI application: the newest page, as a whole answer."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._made_at = -FRESH_S
        self._page = b""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        reads = scope["method"] == "GET"
        if reads and time.monotonic() - self._made_at >= FRESH_S:
            self._page, self._made_at = generate_latest(self._registry), time.monotonic()
        page = self._page if reads else b""
        headers = [
            (b"content-type", _TEXT),
            (b"content-length", b"%d" % len(page)),
            (b"connection", b"close"),
        ]
        await send({"type": "http.response.start", "status": 200 if reads else 405, "headers": headers})
        await send({"type": "http.response.body", "body": page})


class Endpoint:
    """Serves one registry at the address of `metrics.listen`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._listen = ""
        self._serving: tuple[GatewayServer, asyncio.AbstractEventLoop, threading.Thread] | None = None
        self.port: int | None = None
        """The port in use; None while nothing listens."""

    def listen(self, address: str) -> None:
        """Serve at `address` (HOST:PORT) from now on; empty: serve nothing.

        Does nothing where this endpoint serves there already. Raises ConfigError where the address cannot be bound.
        """
        if address == self._listen:
            return
        self.close()
        if not address:
            return
        loop = asyncio.new_event_loop()
        bounds = Bounds(strangers=CONNECTIONS, strangers_of_name=CONNECTIONS // 2)
        server = GatewayServer(_Page(self._registry), bounds=bounds, setting="metrics.listen")
        try:
            (_, self.port), *_ = loop.run_until_complete(server.listen(address))
        except ConfigError:
            loop.run_until_complete(server.close())
            loop.close()
            raise
        thread = threading.Thread(target=loop.run_forever, name="pollux-metrics", daemon=True)
        thread.start()
        self._serving, self._listen = (server, loop, thread), address
        log.info("metrics at http://%s/metrics", address)

    def close(self) -> None:
        if self._serving is not None:
            server, loop, thread = self._serving
            asyncio.run_coroutine_threadsafe(server.close(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()
        self._serving, self._listen, self.port = None, "", None
