"""Serve answers to whoever has munge.

Everything that a client sends is hostile. A request has a bound of bytes and of time; a connection that has not shown a
valid credential gives way to newer ones; one user has a few requests at a time, answered in the order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from polluxd.errors import PolluxError

from .munge import Munge
from .wire import LONGEST_REQUEST, REFUSED, Question, answer_lines, read_request

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one client, one user and all together may use."""

    request_s: float = 5.0
    """From the connection to the whole request."""
    answer_s: float = 60.0
    """From the connection to the last byte of the answer."""
    connections: int = 256
    """Connections at one time. The oldest without a credential gives way to the next."""
    of_one_user: int = 2
    """Requests of one user at one time."""


class AnswerServer:
    """Answers questions in the name of polluxd.

    Args:
        answer: gives the document for a question of a uid; runs in a thread. PolluxErrors are told to the client.
    """

    def __init__(
        self, munge: Munge, answer: Callable[[Question, int], Any], bounds: Bounds | None = None
    ) -> None:
        self._munge = munge
        self._answer = answer
        self._bounds = bounds or Bounds()
        self._silent: dict[asyncio.Task[None], None] = {}
        self._open = 0
        self._asking: Counter[int] = Counter()
        # Credentials are read beside the answers: a long answer keeps nobody from being told to wait.
        self._readers = ThreadPoolExecutor(4, thread_name_prefix="pollux-munge")
        self._answerers = ThreadPoolExecutor(1, thread_name_prefix="pollux-answers")

    async def listen(self, address: str) -> asyncio.Server:
        """Listen at HOST:PORT. Raises OSError."""
        host, _, port = address.rpartition(":")
        return await asyncio.start_server(self._client, host.strip("[]"), int(port), limit=LONGEST_REQUEST)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if self._open >= self._bounds.connections:
            if not self._silent:
                writer.transport.abort()
                return
            oldest = next(iter(self._silent))
            del self._silent[oldest]
            oldest.cancel()
        self._open += 1
        self._silent[task] = None
        try:
            async with asyncio.timeout(self._bounds.answer_s):
                await self._serve(task, reader, writer)
        except (OSError, TimeoutError, asyncio.CancelledError):
            log.debug("a client was hung up on", exc_info=True)
        finally:
            self._silent.pop(task, None)
            self._open -= 1
            writer.transport.abort()

    async def _serve(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._bounds.request_s):
                line = await reader.readuntil(b"\n")
                question, uid = await loop.run_in_executor(self._readers, read_request, self._munge, line)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return
        except PolluxError as error:
            await _refuse(writer, str(error))
            return
        self._silent.pop(task, None)
        if self._asking[uid] >= self._bounds.of_one_user:
            await _refuse(
                writer, f"you have {self._bounds.of_one_user} requests under way: wait for their answers"
            )
            return
        self._asking[uid] += 1
        try:
            lines = await loop.run_in_executor(self._answerers, self._lines, question, uid)
            for each in lines:
                writer.write(each)
                await writer.drain()
            writer.write_eof()
            with contextlib.suppress(asyncio.LimitOverrunError):
                await reader.read(1)  # until the client has read all, and closes
        finally:
            self._asking[uid] -= 1
            if not self._asking[uid]:
                del self._asking[uid]

    def _lines(self, question: Question, uid: int) -> list[bytes]:
        try:
            document = self._answer(question, uid)
        except PolluxError as error:
            document = {"error": str(error)}
        except Exception:
            log.exception("a fault in polluxd itself: a question got no answer; report the traceback below")
            document = {"error": "a fault in polluxd: its log has a traceback"}
        return answer_lines(self._munge, question.nonce, uid, document)


async def _refuse(writer: asyncio.StreamWriter, why: str) -> None:
    writer.write(REFUSED + " ".join(why.split())[:500].encode() + b"\n")
    writer.write_eof()
    await writer.drain()
