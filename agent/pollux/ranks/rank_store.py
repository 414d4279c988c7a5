"""Keep named values for the ranks of a job, in rank 0's process.

Only processes that know the store's secret can read or write them. torch's TCPStore serves everybody who reaches its
port: they can list, read and replace what ranks leave for each other. Here torch's HashStore holds the values, and
other processes reach it over authenticated connections (see `links`). torch forms process groups over it, too.

A request is JSON: [operation, key, value, value that is expected, amount or seconds]. Bytes travel as Latin-1 text.
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
from pollux.ranks.links import RANKS, Door, Link, connect

ANSWER_S = 60.0
"""Seconds in which the store has to answer, beside those that a request asks it to wait."""
PATIENCE = timedelta(seconds=60)
"""Longest wait for a value, unless a call names another."""


class NoValue(RankLost):
    """A value has not come in time."""


Request = tuple[str, str, bytes, bytes, float]


def parse(text: bytes) -> Request:
    """A request. Raises ValueError."""
    try:
        match json.loads(text):
            case [str(op), str(key), str(value), str(old), int() | float() as number] if op in _OPERATIONS:
                if type(number) is not bool and abs(number) < 1 << 62:
                    return op, key, value.encode("latin-1"), old.encode("latin-1"), number
    except RecursionError:
        pass
    raise ValueError(f"expected a request to the store, got {text!r:.200}")


def carry_out(store: Any, request: Request) -> bytes | int | None:
    """The answer of a store of torch's; None where a value is not there."""
    op, key, value, old, number = request
    match op:
        case "set":
            store.set(key, value)
        case "get":
            return bytes(store.get(key)) if store.check([key]) else None
        case "wait":
            try:
                store.wait([key], timedelta(seconds=min(max(number, 0.0), PATIENCE.total_seconds())))
            except (dist.DistError, RuntimeError):
                return None
            return 1
        case "swap":
            return bytes(store.compare_set(key, old.decode(), value.decode()))
        case "add":
            return int(store.add(key, int(number)))
        case "delete":
            return int(store.delete_key(key))
    return None


_OPERATIONS = ("set", "get", "wait", "swap", "add", "delete")


class Server:
    """The store in this process, which other processes reach."""

    def __init__(self, key: bytes) -> None:
        """Raises OSError."""
        self.values: Any = dist.HashStore()  # type: ignore[attr-defined]
        self.values.set_timeout(PATIENCE)
        listener = socket.create_server(("", 0), backlog=1024)
        self.port = int(listener.getsockname()[1])
        Door(listener, key, RANKS, self._serve)

    def _serve(self, link: Link, _: bytes) -> None:
        """Answer one process until it ends, or sends what is no request."""
        with contextlib.suppress(OSError, ValueError, dist.DistError, RuntimeError):
            while True:
                answer = carry_out(self.values, parse(link.receive()))
                text = answer.decode("latin-1") if isinstance(answer, bytes) else answer
                link.send(json.dumps(text).encode())
        link.close()


class RemoteStore(dist.Store):  # type: ignore[misc, name-defined]
    """The store as other processes reach it, in torch's own terms.

    Any thread may ask; one at a time is answered. All methods raise RankLost where the store is gone.
    """

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Raises NoAnswer."""
        super().__init__()
        self._link = connect(address, [port], key, RANKS, b"{}")
        self.here = self._link.here
        """This side's address."""
        self._asking = threading.Lock()
        self._patience = PATIENCE

    def set(self, key: str, value: Any) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        if (found := self._ask("get", key)) is None:
            self.wait([key])
            found = self._ask("get", key)
        return bytes(found or b"")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = (timeout or self._patience).total_seconds()
        for key in keys:
            if self._ask("wait", key, number=seconds) is None:
                raise NoValue(f"no value of {key} came within {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        return all(self._ask("get", key) is not None for key in keys)

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, number=amount) or 0)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        return bytes(self._ask("swap", key, _bytes(desired), _bytes(expected)) or b"")

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    deleteKey = delete_key  # noqa: N815 - the name that torch's C++ side looks for

    def set_timeout(self, timeout: timedelta) -> None:
        self._patience = timeout

    def clone(self) -> RemoteStore:
        """Any thread may ask, so one store serves them all."""
        return self

    def _ask(self, op: str, key: str, value: bytes = b"", old: bytes = b"", number: float = 0) -> Any:
        request = [op, key, value.decode("latin-1"), old.decode("latin-1"), number]
        try:
            with self._asking:
                self._link.send(json.dumps(request).encode())
                answer = json.loads(self._link.receive(ANSWER_S + (number if op == "wait" else 0)))
        except (OSError, ValueError, RecursionError) as error:
            self._link.end()  # a late answer must not be taken for the next one
            raise RankLost(f"the store of the ranks does not answer: {error}") from error
        return answer.encode("latin-1") if isinstance(answer, str) else answer


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
