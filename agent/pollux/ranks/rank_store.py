"""Keep named values for the ranks of a job, in rank 0's process.

Only processes that know the store's secret can read or write them. torch's TCPStore serves everybody who reaches its
port: they can list, read and replace what ranks leave for each other. Here torch's HashStore holds the values, and
other processes reach it over authenticated connections (see `links`). torch forms process groups over it, too.

A request is JSON: the operation, the key, and what the operation takes. Bytes travel as Latin-1 text.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pollux.errors import RankLost
from pollux.ranks.links import RANKS, Door, Link, reach

ANSWER_S = 60.0
"""Seconds in which the store has to answer, beside those that a request asks it to wait."""
PATIENCE = timedelta(seconds=60)
"""Longest wait for a value, unless a call names another."""


class NoValue(RankLost):
    """A value has not come in time."""


def carry_out(store: Any, text: bytes) -> bytes | int | None:
    """The answer of a store of torch's to a request; None where a value is not there. Raises ValueError."""
    try:
        request = json.loads(text)
    except RecursionError:
        request = None
    match request:
        case ["set", str(key), str(value)]:
            store.set(key, value.encode("latin-1"))
            return None
        case ["get", str(key)]:
            return bytes(store.get(key)) if store.check([key]) else None
        case ["wait", str(key), int() | float() as seconds]:
            try:
                store.wait([key], timedelta(seconds=min(max(seconds, 0.0), PATIENCE.total_seconds())))
            except (dist.DistError, RuntimeError):
                return None
            return 1
        case ["swap", str(key), str(value), str(old)]:
            return bytes(store.compare_set(key, old, value))
        case ["add", str(key), int(amount)] if abs(amount) < 1 << 62:
            return int(store.add(key, amount))
        case ["delete", str(key)]:
            return int(store.delete_key(key))
    raise ValueError(f"expected a request to the store, got {text!r:.200}")


class Server:
    """The store in this process, which other processes reach."""

    def __init__(self, key: bytes) -> None:
        """Raises OSError."""
        self.values: Any = dist.HashStore()
        self.values.set_timeout(PATIENCE)
        listener = socket.create_server(("", 0), backlog=1024)
        self.port = int(listener.getsockname()[1])
        Door(listener, key, RANKS, self._serve)

    def _serve(self, link: Link, _: bytes) -> None:
        """Answer one process until it ends, or sends what is no request."""
        with contextlib.suppress(OSError, ValueError, dist.DistError, RuntimeError):
            while True:
                answer = carry_out(self.values, link.receive())
                text = answer.decode("latin-1") if isinstance(answer, bytes) else answer
                link.send(json.dumps(text).encode())
        link.close()


class RemoteStore(dist.Store):
    """The store as other processes reach it, in torch's own terms.

    Any thread may ask; one at a time is answered. All methods raise RankLost where the store is gone.
    """

    def __init__(self, address: str, port: int, key: bytes, patience_s: float = 0.0) -> None:
        """`patience_s`: how long to try again while what listens there does not know the key. Raises NoAnswer."""
        super().__init__()
        self._link = reach(address, [port], key, RANKS, patience_s)
        self.here = self._link.here
        """This side's address."""
        self._asking = threading.Lock()
        self._patience = PATIENCE

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str) -> bytes:
        if (found := self._ask("get", key)) is None:
            self.wait([key])
            found = self._ask("get", key)
        return bytes(found or b"")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self._patience).total_seconds()
        for key in keys:
            if self._ask("wait", key, seconds, answer_s=ANSWER_S + seconds) is None:
                raise NoValue(f"no value of {key} came within {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("get", key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount) or 0)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ask("swap", key, _text(desired), _text(expected)) or b"")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key  # noqa: N815 - the name that torch's C++ side looks for

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    def clone(self) -> RemoteStore:
        """Any thread may ask, so one store serves them all."""
        return self

    def _ask(self, *request: Any, answer_s: float = ANSWER_S) -> Any:
        try:
            with self._asking:
                self._link.send(json.dumps(request).encode())
                answer = json.loads(self._link.receive(answer_s))
        except (OSError, ValueError, RecursionError) as error:
            self._link.end()  # a late answer must not be taken for the next one
            raise RankLost(f"the store of the ranks does not answer: {error}") from error
        return answer.encode("latin-1") if isinstance(answer, str) else answer


def _text(value: Any) -> str:
    """Bytes as text of JSON; torch also gives text."""
    return value if isinstance(value, str) else bytes(value).decode("latin-1")
