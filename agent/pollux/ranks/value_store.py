"""Keep named values for the ranks of a job.

Only processes that know the store's secret can read or write them.

torch's TCPStore serves everybody who reaches its port: they can list, read and replace what ranks leave for each other.
This store takes authenticated connections alone (see `sealed`). torch forms process groups over it, too.

Requests and answers are lines of JSON, with values in base64:

    {"op": "set" | "get" | "delete" | "swap" | "add" | "wait",
     "keys": [...], "value": text, "amount": N, "old": text}
    {"values": [text or null, ...], "amount": N}

"wait" is answered once one of the keys is there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Self

from pollux.ranks.sealed import Entrance, Frames, NotAuthentic, connect, keep_alive

logger = logging.getLogger("pollux")

PURPOSE = "ranks"
ANSWER_S = 60.0
"""Seconds in which the store has to answer."""
SEND_S = 10.0

Operation = Literal["set", "get", "delete", "swap", "add", "wait"]
_OPERATIONS = ("set", "get", "delete", "swap", "add", "wait")


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """What one rank asks of the store."""

    op: Operation
    keys: tuple[str, ...]
    value: bytes = b""
    amount: int = 0
    old: bytes = b""

    def pack(self) -> bytes:
        raw = {"op": self.op, "keys": self.keys, "amount": self.amount}
        return json.dumps(raw | {"value": _text(self.value), "old": _text(self.old)}).encode()

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Raises ValueError."""
        match _json(text):
            case {
                "op": str(op),
                "keys": [*keys],
                "amount": int(amount),
                "value": str(value),
                "old": str(old),
            } if op in _OPERATIONS and keys and all(isinstance(key, str) for key in keys):
                if type(amount) is int and abs(amount) < 1 << 63:
                    return cls(op, tuple(keys), _bytes(value), amount, _bytes(old))  # type: ignore[arg-type]
        raise ValueError(f"expected a request to the store, got {text!r:.200}")


@dataclass(frozen=True, slots=True)
class StoreAnswer:
    """The store's answer: the keys' values, None where there is none.

    A counter's new value.
    """

    values: tuple[bytes | None, ...] = ()
    amount: int = 0

    def pack(self) -> bytes:
        values = [None if value is None else _text(value) for value in self.values]
        return json.dumps({"values": values, "amount": self.amount}).encode()

    @classmethod
    def parse(cls, text: bytes) -> Self:
        """Raises ValueError."""
        match _json(text):
            case {"values": [*values], "amount": int(amount)} if type(amount) is int:
                if all(value is None or isinstance(value, str) for value in values):
                    return cls(tuple(None if v is None else _bytes(v) for v in values), amount)
        raise ValueError(f"expected an answer of the store, got {text!r:.200}")


class Values:
    """The values, and who waits for one. Any thread may ask."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self.on_change: Callable[[], None] = lambda: None
        """Called after each change, by the thread that made it."""

    def ask(self, request: StoreRequest) -> StoreAnswer | None:
        """Carry out a request; None for a wait whose keys are not there yet."""
        with self._changed:
            answer = self._carry_out(request)
            if request.op not in ("get", "wait"):
                self._changed.notify_all()
        if request.op not in ("get", "wait"):
            self.on_change()
        return answer

    def wait(self, keys: Sequence[str], timeout: float | None) -> bool:
        """Wait until one of the keys is there; False where none is in time."""
        with self._changed:
            return self._changed.wait_for(lambda: any(key in self._values for key in keys), timeout)

    def _carry_out(self, request: StoreRequest) -> StoreAnswer | None:
        values, key = self._values, request.keys[0]
        match request.op:
            case "set":
                values[key] = request.value
            case "delete":
                return StoreAnswer(amount=int(values.pop(key, None) is not None))
            case "swap":
                if values.get(key, b"") == request.old:
                    values[key] = request.value
            case "add":
                try:
                    amount = int(values.get(key, b"0")) + request.amount
                except ValueError:
                    amount = request.amount
                values[key] = b"%d" % amount
                return StoreAnswer(amount=amount)
            case "wait" if not any(key in values for key in request.keys):
                return None
        return StoreAnswer(tuple(map(values.get, request.keys)))


@dataclass(slots=True)
class _Client:
    frames: Frames
    waits: list[StoreRequest] = field(default_factory=list)


class Server:
    """Serves the values to other processes, in a thread."""

    def __init__(self, key: bytes) -> None:
        """Raises OSError."""
        self.values = Values()
        listener = socket.create_server(("", 0), backlog=1024)
        self.port = int(listener.getsockname()[1])
        self._entrance = Entrance(listener, key, PURPOSE)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._entrance.fileno(), selectors.EVENT_READ)
        self._clients: dict[socket.socket, _Client] = {}
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self.values.on_change = self._changed
        threading.Thread(target=self._serve, name="pollux-store", daemon=True).start()

    def _changed(self) -> None:
        """Somebody may wait for what has changed."""
        with contextlib.suppress(BlockingIOError):  # it is to wake up already
            self._wake.send(b"x")

    def _serve(self) -> NoReturn:
        """Serve the values until this process ends."""
        while True:
            # A stranger who stays silent is to be dropped in time.
            for key, _ in self._selector.select(1.0 if self._entrance.waiting else None):
                if key.fileobj is self._woken:
                    self._woken.recv(4096)
                elif isinstance(key.fileobj, socket.socket) and key.fileobj in self._clients:
                    self._read(key.fileobj)
            for connection, frames, _ in self._entrance.admitted(0.0):
                connection.settimeout(SEND_S)
                keep_alive(connection)
                self._clients[connection] = _Client(frames)
                self._selector.register(connection, selectors.EVENT_READ)
                self._answer(connection)
            for connection, client in list(self._clients.items()):
                if client.waits:
                    self._answer_waits(connection, client)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        self._clients[connection].frames.feed(data)
        self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        client = self._clients[connection]
        try:
            while (text := client.frames.take()) is not None:
                request = StoreRequest.parse(text)
                answer = self.values.ask(request)
                if answer is None:
                    client.waits.append(request)
                else:
                    connection.sendall(client.frames.pack(answer.pack()))
        except (OSError, ValueError, NotAuthentic) as error:
            logger.warning("a connection to the store of the ranks ends: %s", error)
            self._drop(connection)

    def _answer_waits(self, connection: socket.socket, client: _Client) -> None:
        try:
            for request in list(client.waits):
                answer = self.values.ask(request)
                if answer is not None:
                    client.waits.remove(request)
                    connection.sendall(client.frames.pack(answer.pack()))
        except OSError:
            self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._clients[connection]
        connection.close()


class Client:
    """Another process's connection to the values.

    Any thread may ask; one at a time is answered.
    """

    def __init__(self, address: str, port: int, key: bytes) -> None:
        """Raises NoAnswer."""
        self._socket, self._frames = connect(address, [port], key, PURPOSE, b"{}")
        keep_alive(self._socket)
        self._asking = threading.Lock()
        self.here = str(self._socket.getsockname()[0])
        """This side's address."""

    def ask(self, request: StoreRequest, timeout: float | None = ANSWER_S) -> StoreAnswer:
        """Raises OSError (TimeoutError where no answer came in time).

        After that the connection is of no use.
        """
        with self._asking:
            deadline = None if timeout is None else time.monotonic() + timeout
            self._socket.settimeout(SEND_S)
            try:
                self._socket.sendall(self._frames.pack(request.pack()))
                while (text := self._frames.take()) is None:
                    left = None if deadline is None else max(deadline - time.monotonic(), 0.001)
                    self._socket.settimeout(left)
                    data = self._socket.recv(1 << 16)
                    if not data:
                        raise ConnectionResetError("the store has closed the connection")
                    self._frames.feed(data)
                return StoreAnswer.parse(text)
            except (NotAuthentic, ValueError) as error:
                self._socket.close()
                raise ConnectionAbortedError(str(error)) from error
            except OSError:
                # A late answer must not be taken for the next one.
                self._socket.close()
                raise


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
