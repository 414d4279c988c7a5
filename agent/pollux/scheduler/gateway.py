"""Ask polluxd's gateway: JSON over HTTP, by the standard library alone.

Every wait and every answer is bounded. Certificates are verified. Without TLS a gateway has to be on this machine, and
the listening socket has to belong to a system account. No message of an error holds a token.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import select
import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

from pollux.scheduler.listener import require_trusted_listener
from pollux.version import __version__

CONNECT_S = 5.0
ANSWER_S = 8.0
LARGEST_ANSWER = 65536  # bytes


class GatewayError(Exception):
    """The gateway gave no answer, or refused."""


class GatewayAway(GatewayError):
    """No gateway answers, or it cannot serve this job yet: try again later."""


class Superseded(GatewayAway):
    """A newer request of the same token has taken this one's place."""


class TokenRefused(GatewayError):
    """The gateway does not know the token (any more)."""


class AttemptOver(GatewayError):
    """The job has ended, or a later attempt runs."""


class MessageRefused(GatewayError):
    """The gateway refused this message; it may accept the next one."""


class TooOften(MessageRefused):
    """The gateway takes no more messages of this kind for some time."""


class Gateway:
    """One connection to the first of several gateways that answers.

    After a fault, the next request goes to the next address (URLs such as https://head.example.org:9851). Only one
    thread at a time may ask; `interrupt` is for others. `ca`: file of the certificates that vouch for the gateways;
    empty: the system's.
    """

    def __init__(self, addresses: Sequence[str], ca: str = "") -> None:
        self.addresses = tuple(addresses)
        self._ca = ca
        self._current = 0
        self.connection: http.client.HTTPConnection | None = None

    @property
    def address(self) -> str:
        """Where the next request goes."""
        return self.addresses[self._current % len(self.addresses)] if self.addresses else "no address"

    def ask(
        self,
        method: str,
        path: str,
        message: object = None,
        *,
        token: str = "",
        answer_s: float = ANSWER_S,
        largest: int = LARGEST_ANSWER,
    ) -> Any:
        """Send a request with a JSON document, or none; return the answer's document, None if it is empty.

        `answer_s`: longest wait for the answer [s]. `largest`: bytes of the longest answer that is read. Raises
        GatewayAway, TokenRefused, AttemptOver, MessageRefused.
        """
        headers = {"User-Agent": f"pollux/{__version__}", "Accept": "application/json"}
        body = None
        if message is not None:
            body = json.dumps(message, allow_nan=False).encode()
            headers["Content-Type"] = "application/json"
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            connection = self._connected()
            connection.sock.settimeout(answer_s)
            connection.request(method, path, body, headers)
            with connection.getresponse() as response:
                content = _content(response, time.monotonic() + answer_s, largest)
            if response.will_close:
                self.close()
            document = _document(content, strict=response.status < 300)
        except (OSError, http.client.HTTPException, ValueError, RecursionError, AttributeError) as error:
            # AttributeError: `close` has taken the connection away.
            reason = f"{self.address}: {error or type(error).__name__}"
            self.close()
            self._current += 1
            raise GatewayAway(reason) from None
        if 200 <= response.status < 300:
            return document
        raise self._refusal(response.status, document)

    def interrupt(self) -> None:
        """End a request that another thread waits for."""
        connection = self.connection
        sock = connection.sock if connection is not None else None
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()

    def _connected(self) -> http.client.HTTPConnection:
        """Return a connection that is open; raises OSError, ValueError."""
        if self.connection is not None and not _idle(self.connection.sock):
            self.close()
        if self.connection is None:
            url = urlsplit(self.address)
            if url.scheme == "https" and url.hostname:
                context = ssl.create_default_context(cafile=self._ca or None)
                made: http.client.HTTPConnection = http.client.HTTPSConnection(
                    url.hostname, url.port or 443, timeout=CONNECT_S, context=context
                )
            else:
                made = http.client.HTTPConnection(_loopback(url), url.port or 80, timeout=CONNECT_S)
            self.connection = made
            made.connect()
            made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if url.scheme != "https":
                peer, port, *_ = made.sock.getpeername()
                require_trusted_listener(peer, port, client=made.sock.getsockname()[:2])
        return self.connection

    def _refusal(self, status: int, document: Any) -> GatewayError:
        """Return the error that an answer stands for."""
        error = document.get("error") if isinstance(document, dict) else None
        code = str(error.get("code", "")) if isinstance(error, dict) else ""
        message = str(error.get("message", "")) if isinstance(error, dict) else ""
        text = " ".join(f"{self.address} answers {status} {code}: {message}".split())[:500]
        if status == 401:
            return TokenRefused(text)
        if status == 409:
            return Superseded(text) if code == "superseded" else AttemptOver(text)
        if status >= 500 or code == "not-known-yet":
            if status >= 500:
                self._current += 1
                self.close()
            return GatewayAway(text)
        return TooOften(text) if status == 429 else MessageRefused(text)


def _document(content: bytes, *, strict: bool) -> Any:
    """Parse an answer's body. Where it is not JSON: ValueError if `strict`, else None."""
    try:
        return json.loads(content) if content else None
    except (ValueError, RecursionError):
        if strict:
            raise
        return None


def _loopback(url: SplitResult) -> str:
    """Return the address of this machine that an http URL names. Raises ValueError where it names another one."""
    host = "127.0.0.1" if url.hostname == "localhost" else url.hostname or ""
    try:
        here = url.scheme == "http" and ipaddress.ip_address(host).is_loopback
    except ValueError:
        here = False
    if not here:
        raise ValueError(
            "expected https, or http at a loopback address: another machine could pose as the gateway"
        )
    return host


def _idle(sock: socket.socket | None) -> bool:
    """Tell whether a kept connection is open, and has nothing to read."""
    if sock is None:
        return False
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)


def _content(response: http.client.HTTPResponse, deadline: float, largest: int) -> bytes:
    """Read an answer's body; raises OSError where it is too long or too slow."""
    content = bytearray()
    while part := response.read1(65536):
        content += part
        if len(content) > largest:
            raise OSError(f"expected an answer of at most {largest} bytes")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer did not end in time")
    return bytes(content)
