"""A gateway in the test's process, for the messages of agents.

tests/integration/gateway compares it with the real one, and tests/integration/loop has the agent meet that one.
"""

from __future__ import annotations

import base64
import contextlib
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from pollux.slurm_job.access import GatewayAccess, Grant

JOB, ATTEMPT = 7, 2


def credential_of(payload: bytes) -> bytes:
    """Return a text that looks like munge's, around `payload`."""
    return b"MUNGE:" + base64.b64encode(payload) + b":"


def payload_of(credential: bytes) -> bytes:
    """Return what `credential_of` was given."""
    return base64.b64decode(credential.removeprefix(b"MUNGE:").removesuffix(b":"), validate=True)


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str, message: str = "by the test") -> None:
        super().__init__(code)
        self.status, self.code, self.message = status, code, message


class FakeGateway:
    """One job's reports, orders and acknowledgements."""

    def __init__(self) -> None:
        self.reports: list[dict[str, Any]] = []
        self.acknowledged: list[dict[str, Any]] = []
        self.introduced: list[dict[str, Any]] = []
        self.credentials: list[str] = []
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.prior: Any = None
        self.refuse: dict[str, Refusal] = {}
        """By the path of a request."""
        self.accepts = True
        self.publish_interval_s = 0.05
        self.gpu_type = "a100"
        self.polls = 0
        self._orders: dict[str, Any] = {"drain": None, "resize": None}
        self._version = 0
        self._changed = threading.Condition()
        self._closing = False

    def new_token(self) -> str:
        token = f"J.{JOB}.{ATTEMPT}.{secrets.token_urlsafe(32)}"
        self.tokens.add(token)
        return token

    def order(self, **orders: Any) -> None:
        with self._changed:
            self._orders |= orders
            self._version += 1
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def answer(self, method: str, path: str, query: dict[str, list[str]], token: str, body: Any) -> Any:
        self.requests.append(f"{method} {path}")
        if path in self.refuse:
            raise self.refuse[path]
        if (method, path) == ("POST", "/v1/tokens"):
            return self.give_token(body["credential"])
        if token not in self.tokens:
            raise Refusal(401, "token-refused")
        match method, path:
            case "POST", "/v1/report":
                self.reports.append(body)
                return None
            case "POST", "/v1/acknowledgements":
                self.acknowledged.append(body)
                return {"accepted": self.accepts}
            case "POST", "/v1/training":
                self.introduced.append(body)
                return {"prior": self.prior}
            case "GET", "/v1/orders":
                return self._poll(query.get("seen", [""])[0])
        raise Refusal(404, "no-such-path")

    def give_token(self, credential: str) -> dict[str, Any]:
        self.credentials.append(credential)
        return {
            "token": self.new_token(),
            "cluster": "c",
            "publish_interval_s": self.publish_interval_s,
            "gpu_type": self.gpu_type,
            "expires_s": None,
            "nonce": json.loads(payload_of(credential.encode()))["nonce"],
        }

    def _poll(self, seen: str) -> dict[str, Any]:
        with self._changed:
            self.polls += 1
            self._changed.wait_for(lambda: seen != str(self._version) or self._closing, 50)
            if self._closing:
                raise Refusal(503, "unavailable")
            return {"seen": str(self._version), **self._orders}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: FakeGateway

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length)) if length else None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        try:
            document = self.gateway.answer(self.command, url.path, parse_qs(url.query), token, body)
            status = 204 if document is None else 200
        except Refusal as refusal:
            status = refusal.status
            document = {"error": {"code": refusal.code, "message": refusal.message}}
        content = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        if content:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_POST = do_GET  # noqa: N815 - http.server looks for this name

    def log_message(self, *_: Any) -> None: ...


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, gateway: FakeGateway, port: int) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), type("Handler", (_Handler,), {"gateway": gateway}))

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        super().process_request(request, client_address)

    def handle_error(self, *_: Any) -> None: ...

    def drop(self) -> None:
        """End all connections, as the end of a process does."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def serving(gateway: FakeGateway, port: int = 0) -> Iterator[str]:
    """Serve at a loopback port; yield the URL. At the end every connection is cut."""
    server = _Server(gateway, port)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        server.drop()


def access(*addresses: str, token: str | None = None) -> GatewayAccess:
    """What the test's attempt knows of its gateways."""
    grant = None if token is None else Grant(token, 0.05)
    return GatewayAccess(addresses, "", JOB, ATTEMPT, grant)
