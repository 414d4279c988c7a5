"""Fuzz the launchers' and the ranks' sockets with a stranger's bytes.

The reader neither crashes nor hangs, and accepts no message that makes no sense.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import socket
import threading
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pollux.launcher import messages
from pollux.launcher.meeting import parse_hello
from pollux.launcher.messages import (
    AnnounceMove,
    AwaitLeavers,
    EndWorkers,
    Hello,
    Leave,
    Message,
    MoveAnswer,
    NodesLeft,
    Over,
    Signalled,
    Start,
    Stop,
    WorkerEnded,
)
from pollux.ranks.links import Link
from pollux.ranks.plain_values import dumps, loads
from pollux.ranks.rank_store import carry_out
from tests.fuzz.json_values import json_values

KEY = b"the job's key"

counts = st.integers(0, (1 << 63) - 1)
names = st.lists(st.text(max_size=10), max_size=4).map(tuple)
seconds = st.floats(0, allow_nan=False, allow_infinity=False)
texts = st.text(max_size=20)
typed: st.SearchStrategy[Message] = st.one_of(
    st.builds(Start, counts, counts, st.dictionaries(texts, texts, max_size=3)),
    st.builds(EndWorkers, seconds, seconds),
    st.builds(Over, counts),
    st.builds(WorkerEnded, counts, counts, seconds, texts, texts, st.booleans(), st.booleans()),
    st.builds(Signalled, counts),
    st.builds(AnnounceMove, counts, names, counts),
    st.builds(AwaitLeavers, counts),
    st.builds(Hello, counts, counts, texts),
    st.builds(MoveAnswer, counts, texts),
    st.builds(NodesLeft, names),
    st.sampled_from([Stop(), Leave()]),
)


def sensible(message: Message) -> bool:
    """Return whether each value of a message is of its type."""
    for value in dataclasses.asdict(message).values():
        match value:
            case bool() | str():
                continue
            case int():
                good = value >= 0
            case float():
                good = 0 <= value < math.inf
            case tuple():
                good = all(isinstance(each, str) for each in value)
            case dict():
                good = all(isinstance(each, str) for each in (*value, *value.values()))
            case _:
                good = False
        if not good:
            return False
    return True


@given(typed)
def test_every_message_comes_back(message: Message) -> None:
    assert messages.parse(messages.pack(message)) == message
    assert sensible(message)


@given(typed, st.text(max_size=8), json_values)
def test_a_message_with_any_other_field_is_sensible_or_refused(
    message: Message, name: str, value: Any
) -> None:
    raw = json.loads(messages.pack(message))
    fields = sorted(raw)
    raw[fields[sum(map(ord, name)) % len(fields)]] = value
    try:
        found = messages.parse(json.dumps(raw).encode())
    except ValueError:
        return
    assert sensible(found)


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_text_is_no_message_or_a_sensible_one(text: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert sensible(messages.parse(text))
    with contextlib.suppress(ValueError, RuntimeError):
        carry_out(dist.HashStore(), text)  # type: ignore[attr-defined]
    hello = parse_hello(text, 4)
    assert hello is None or (1 <= hello.node < 4 and hello.workers > 0)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_a_stranger_never_gets_past_the_handshake(chunks: list[bytes]) -> None:
    """Bytes without the frame of a message, and whole messages."""
    for framed in (False, True):
        for server in (True, False):
            ours, theirs = socket.socketpair()
            stranger = Connection(theirs.detach())
            for chunk in chunks:
                if framed:
                    stranger.send_bytes(chunk)
                else:
                    os.write(stranger.fileno(), chunk)
            with socket.socket(fileno=os.dup(stranger.fileno())) as line:
                line.shutdown(socket.SHUT_WR)
            link = Link(ours)
            with pytest.raises(OSError):  # noqa: PT011 - of any kind
                link.welcome(KEY, "test") if server else link.greet(KEY, "test", b"hello", 10.0)
            link.close()
            stranger.close()


@given(st.lists(st.binary(max_size=30), min_size=1, max_size=5), st.data())
def test_what_is_taken_from_a_changed_stream_was_sent(texts: list[bytes], data: st.DataObject) -> None:
    """An attacker cuts, changes, repeats or leaves out bytes on their way."""
    (client, between), (here, server) = meet_across()
    for text in texts:
        client.send(text)
    client.close()
    stream = bytearray(between.makefile("rb").read())
    for _ in range(data.draw(st.integers(0, 3))):
        start = data.draw(st.integers(0, len(stream)))
        stop = data.draw(st.integers(start, len(stream)))
        stream[start:stop] = data.draw(st.binary(max_size=20) | st.just(bytes(stream)))
    here.sendall(stream)
    here.shutdown(socket.SHUT_WR)
    taken: list[bytes] = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(server.receive(10.0))
    assert taken == texts[: len(taken)]
    for each in (between, here, server):
        each.close()


def meet_across() -> tuple[tuple[Link, socket.socket], tuple[socket.socket, Link]]:
    """A client and a server after their handshake, and both ends of the way between them."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    client, server = Link(a), Link(d)
    thread = threading.Thread(target=client.greet, args=(KEY, "test", b"hello", 60.0))
    thread.start()
    welcomed = threading.Thread(target=server.welcome, args=(KEY, "test"))
    welcomed.start()
    one, two = Connection(os.dup(b.fileno())), Connection(os.dup(c.fileno()))
    for source, target in ((one, two), (two, one), (two, one), (one, two)):
        target.send_bytes(source.recv_bytes())
    thread.join()
    welcomed.join()
    one.close()
    two.close()
    return (client, b), (c, server)


contents = st.binary(max_size=5).map(lambda raw: raw.decode("latin-1"))
keys = st.sampled_from(["a", "b"])
requests = st.one_of(
    st.tuples(st.just("set"), keys, contents),
    st.tuples(st.sampled_from(["get", "delete"]), keys),
    st.tuples(st.just("swap"), keys, contents, contents),
    st.tuples(st.just("add"), keys, st.integers(-(1 << 61), 1 << 61)),
)


@given(st.lists(requests, max_size=8))
def test_the_store_answers_any_requests(asked: list[tuple[Any, ...]]) -> None:
    values = dist.HashStore()  # type: ignore[attr-defined]
    for each in asked:
        with contextlib.suppress(ValueError, RuntimeError):  # what ends the connection of who asks
            answer = carry_out(values, json.dumps(each).encode())
            assert answer is None or isinstance(answer, bytes | int)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(plain)
def test_plain_values_come_back(value: Any) -> None:
    assert loads(dumps(value)) == value


@given(st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_text_is_no_value_or_a_plain_one(text: bytes) -> None:
    try:
        value = loads(text)
    except ValueError:
        return
    dumps(value)


WORDS = (
    "tensor list tuple set dict OrderedDict Counter complex bytes array number size dtype device record float32 uint8 "
    "NoiseScale <f4 O AAAA _metadata"
)
kinds = st.sampled_from(WORDS.split())
tagged: st.SearchStrategy[Any] = st.recursive(
    kinds | st.none() | st.integers(-2, 5) | st.floats(),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


@given(tagged)
def test_any_value_in_the_format_s_own_words_is_refused_or_plain(raw: Any) -> None:
    try:
        value = loads(json.dumps(raw).encode())
    except ValueError:
        return
    dumps(value)


def test_the_largest_tensor_that_is_announced_is_not_allocated() -> None:
    """A tensor's message must carry its whole content."""
    with pytest.raises(ValueError):  # noqa: PT011 - torch's own words
        loads(b'["tensor", ["float32", [1152921504606846976], "AAAAAA=="]]')
    assert torch.equal(loads(dumps(torch.ones(2))), torch.ones(2))
