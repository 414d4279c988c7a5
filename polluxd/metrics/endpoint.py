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
"""Most connections at one time. A further one takes the place of the oldest that has asked for nothing yet."""
PATIENCE_S = 5.0
"""Longest time for one request and its answer."""


class _Handler(WSGIRequestHandler):
    server: _Server

    def parse_request(self) -> bool:
        sound = super().parse_request()  # waits for the whole request
        self.server.asked(self.connection)
        return sound

    def log_message(self, format: str, *args: Any) -> None:
        """Leave requests out of polluxd's log."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    address_family = socket.AF_INET

    def __init__(self, *args: Any, **options: Any) -> None:
        self._lock = threading.Lock()
        self._has_asked: dict[socket.socket, bool] = {}
        """The connections, the oldest first."""
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            full = len(self._has_asked) >= CONNECTIONS
            silent = next((one for one, asked in self._has_asked.items() if not asked), None)
            if full and silent is not None:
                del self._has_asked[silent]
                _hang_up(silent)
            accepted = not full or silent is not None
            if accepted:
                self._has_asked[request] = False
        if accepted:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def asked(self, request: socket.socket) -> None:
        """Keep the place of a connection on which a request has come."""
        with self._lock:
            if request in self._has_asked:
                self._has_asked[request] = True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A timeout of the socket would begin again with each byte that a slow client sends.
        deadline = threading.Timer(PATIENCE_S, _hang_up, (request,))
        deadline.daemon = True
        deadline.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            deadline.cancel()
            with self._lock:
                self._has_asked.pop(request, None)

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
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server, self._listen = None, ""
