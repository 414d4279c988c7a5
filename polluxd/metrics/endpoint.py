"""The HTTP endpoint that Prometheus scrapes: prometheus_client's own server."""

from __future__ import annotations

import logging
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server

log = logging.getLogger(__name__)


class Endpoint:
    """Serves one registry at the address of `metrics.listen`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
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
        self._server, _ = start_http_server(int(port), host.strip("[]"), self._registry)
        self._listen = address
        log.info("metrics at http://%s/metrics", address)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        self._server, self._listen = None, ""
