"""A gateway in a thread of the test."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import json
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import uvloop

from polluxd.gateway.app import GatewayService
from polluxd.gateway.records import Holder, Records
from polluxd.gateway.server import GatewayServer
from polluxd.gateway.visitors import Bounds

PATIENCE_S = 60.0


class NoMunge:
    """For tests whose tokens are given out without a credential."""

    def decode(self, credential: bytes) -> tuple[bytes, int]:
        raise AssertionError("no credential was expected")


class NoQuestions:
    """For tests in which no user asks."""

    def jobs(self, uid: int, *, ended: bool) -> Any:
        return [uid, ended]

    def top(self, uid: int) -> Any:
        return uid

    def cluster(self, uid: int) -> Any:
        return uid

    def explain(self, uid: int, job: int) -> Any:
        return [uid, job]

    def history(self, uid: int, job: int, since: float) -> Any:
        return [uid, job, since]


@contextmanager
def serving(
    records: Records,
    *,
    cluster: str,
    munge: Any = None,
    questions: Any = None,
    bounds: Bounds | None = None,
    interval_s: float = 30.0,
    tls: Any = None,
) -> Iterator[str]:
    """Serve in a thread; yield the URL."""
    gateway = GatewayService(
        records,
        questions or NoQuestions(),
        munge or NoMunge(),
        cluster=cluster,
        version="test",
        interval_s=interval_s,
    )
    loop, ready, found = uvloop.new_event_loop(), threading.Event(), []
    stopped = asyncio.Event()

    async def main() -> None:
        server = GatewayServer(gateway.app(), tls, bounds)
        found.append((await server.listen("127.0.0.1:0"))[0])
        ready.set()
        await stopped.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(main(),), name="test-gateway")
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield f"{'http' if tls is None else 'https'}://{found[0][0]}:{found[0][1]}"
    finally:
        loop.call_soon_threadsafe(stopped.set)
        thread.join(PATIENCE_S)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def token_of(records: Any, job_id: int, *, attempt: int = 0, uid: int = 1000) -> str:
    """Give out a token of an attempt, as for a credential."""
    text = f"J.{job_id}.{attempt}.{secrets.token_urlsafe(32)}"
    records.issue(Holder(uid, job_id, attempt), hashlib.sha256(text.encode()).digest())
    return text


def user_token_of(records: Any, uid: int = 1000) -> str:
    """Give out a token of a user."""
    text = f"U.{uid}.{secrets.token_urlsafe(32)}"
    records.issue(Holder(uid, expires_s=60.0), hashlib.sha256(text.encode()).digest())
    return text


class Caller:
    """A client with one kept connection."""

    def __init__(self, url: str, token: str = "") -> None:
        self.token = token
        parts = urlsplit(url)
        self.connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=PATIENCE_S)

    def ask(
        self, method: str, path: str, document: Any = None, *, body: bytes | None = None
    ) -> tuple[int, Any]:
        """Return status and document of the answer."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        sent = body if document is None else json.dumps(document).encode()
        self.connection.request(method, path, sent, headers)
        with self.connection.getresponse() as response:
            content = response.read()
        return response.status, json.loads(content) if content else None

    def code(
        self, method: str, path: str, document: Any = None, *, body: bytes | None = None
    ) -> tuple[int, str]:
        """Return status and code of an error."""
        status, answer = self.ask(method, path, document, body=body)
        return status, answer["error"]["code"]


def connect(url: str) -> socket.socket:
    """Return a connection on which nothing was sent."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def until_closed(raw: socket.socket) -> bytes:
    """Return all that the gateway sends until it hangs up."""
    received = b""
    with suppress(ConnectionError):
        while data := raw.recv(65536):
            received += data
    return received


def document_of(raw: socket.socket) -> bytes:
    """Return an answer with its document."""
    received = b""
    while not received.endswith(b"}"):
        data = raw.recv(65536)
        assert data, received
        received += data
    return received
