"""The HTTP endpoint that Prometheus scrapes.

Whoever reaches the address can connect: the number of connections and the time of each are bounded, and no request
changes anything.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger(__name__)

CONNECTIONS = 8
"""Most connections at one time; further ones are closed at once."""
PATIENCE_S = 5.0
"""Longest time for one request and its answer."""


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of polluxd's log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, *args: Any, **options: Any) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A timeout of the socket would begin again with each byte that a slow client sends.
        deadline = threading.Timer(PATIENCE_S, _hang_up, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no fault of polluxd's."""
        log.debug("a metrics client failed", exc_info=True)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _hang_up(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class Endpoint:
    """Serves one registry at the address of `metrics.listen`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._app = make_wsgi_app(registry)
        self._server: WSGIServer | None = None
        self._listen = ""

    @property
    def port(self) -> int | None:
        """The port in use; None while nothing listens."""
        return self._server.server_port if self._server is not None else None

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
        host = host.strip("[]")
        server = make_server(
            host, int(port), self._app, _Server6 if ":" in host else _Server, handler_class=_Handler
        )
        threading.Thread(target=server.serve_forever, name="pollux-metrics", daemon=True).start()
        self._server, self._listen = server, address
        log.info("metrics at http://%s/metrics", address)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server, self._listen = None, ""
