"""Ask polluxd's answers from any host of the cluster."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence
from typing import Any

from polluxd.errors import PolluxError

from .munge import Munge
from .wire import LONGEST_ANSWER, REFUSED, AnswerError, Question, read_answer, request_line

_CONNECT_S = 5.0
_ANSWER_S = 70.0


class NoAnswers(PolluxError):
    """polluxd gives no answers here."""


class AnswersClient:
    """Asks the first server that answers.

    Args:
        servers: addresses to try, (host, port).
        trusted: uids that may answer, beside system accounts (below 1000).
    """

    def __init__(self, servers: Sequence[tuple[str, int]], munge: Munge, trusted: frozenset[int]) -> None:
        self.servers = servers
        self._munge = munge
        self.trusted = trusted

    def ask(self, question: Question) -> Any:
        """Return the answer.

        Raises NoAnswers where no server can be reached, MungeError, AnswerError, and PolluxError with the words
        of the server.
        """
        failed = []
        for host, port in self.servers:
            try:
                lines = _exchange((host, port), request_line(self._munge, question))
            except OSError as error:
                failed.append(f"{host}:{port} ({error.strerror or error})")
                continue
            if lines[:1] and lines[0].startswith(REFUSED):
                raise PolluxError(f"polluxd refused: {lines[0][1:].decode(errors='replace').strip()}")
            document = read_answer(self._munge, question.nonce, lines, self.trusted)
            if isinstance(document, dict) and "error" in document:
                raise PolluxError(str(document["error"]))
            return document
        raise NoAnswers(
            f"polluxd answers ordinary users at none of {', '.join(failed) or 'no address'}: ask an administrator to "
            "start `polluxd answer` there, or name its host with POLLUX_SERVER=HOST[:PORT]"
        )


def _exchange(address: tuple[str, int], request: bytes) -> list[bytes]:
    """Send a request; return the lines of the answer.

    Raises OSError, and AnswerError for a cut or endless answer.
    """
    until = time.monotonic() + _ANSWER_S
    with socket.create_connection(address, timeout=_CONNECT_S) as connection:
        connection.sendall(request)
        received = bytearray()
        while not (received.endswith(b"\n\n") or (received[:1] == REFUSED and received.endswith(b"\n"))):
            if len(received) > LONGEST_ANSWER:
                raise AnswerError(f"{address[0]}:{address[1]} sends more than {LONGEST_ANSWER >> 20} MiB")
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no whole answer within {_ANSWER_S:g} s")
            connection.settimeout(left)
            part = connection.recv(65536)
            if not part:
                raise AnswerError(f"{address[0]}:{address[1]} ended the answer in its middle: try again")
            received += part
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
    return bytes(received).splitlines()[: -1 if received[:1] != REFUSED else None]
