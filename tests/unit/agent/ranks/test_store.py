"""The store where ranks meet.

Ranks leave values there for each other. No other process can see or change them.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pollux.errors import RankLost
from pollux.ranks import rendezvous as rendezvous_module
from pollux.ranks.handover import hand_over
from pollux.ranks.links import RANKS, NoAnswer, connect
from pollux.ranks.rank_store import NoValue, RemoteStore, Server
from pollux.ranks.rendezvous import Rendezvous, leave_groups
from pollux.ranks.torch_internals import gloo_timeout_changes
from pollux.ranks.world import World, is_own, join

LOCAL = {"MASTER_ADDR": "127.0.0.1"}


def test_values_are_left_and_found() -> None:
    first = Rendezvous.open(dict(LOCAL))
    second = Rendezvous.join("127.0.0.1", first.port, first.secret)
    for one, other in ((first, second), (second, first)):
        assert other.value("nothing") is None
        one.tell("here", {"a": [1, None]})
        assert other.value("here") == {"a": [1, None]}
        before = other.count("steps")
        assert one.count("steps", 2) == before + 2
        assert other.count("steps") == before + 2


def test_a_wait_ends_with_its_value() -> None:
    first = Rendezvous.open(dict(LOCAL))
    second = Rendezvous.join("127.0.0.1", first.port, first.secret)
    third = Rendezvous.join("127.0.0.1", first.port, first.secret)
    found: list[Any] = []
    waiting = [
        threading.Thread(target=lambda each=each: found.append(each.awaited("go")))
        for each in (first, second)
    ]
    for thread in waiting:
        thread.start()
    assert found == []
    third.tell("go", 1)
    for thread in waiting:
        thread.join(60)
    assert found == [1, 1]


def test_a_stranger_gets_nothing() -> None:
    first = Rendezvous.open(dict(LOCAL))
    first.tell("secret", "value")
    for guessed in (b"guessed", b""):
        with pytest.raises(NoAnswer, match="not this job's"):
            RemoteStore("127.0.0.1", first.port, guessed)
    with socket.create_connection(("127.0.0.1", first.port)) as line:
        stranger = Connection(os.dup(line.fileno()))
        for _ in range(2):
            stranger.send_bytes(json.dumps(["get", "secret"]).encode())
        stranger.close()
        line.settimeout(20)
        found = b""
        with suppress(ConnectionResetError):
            while data := line.recv(4096):
                found += data
        assert b"value" not in found
    second = Rendezvous.join("127.0.0.1", first.port, first.secret)
    assert second.value("secret") == "value", "the store has outlived them"


def test_without_the_store_there_is_a_typed_error() -> None:
    with socket.socket() as held:  # bound, so that nobody listens there
        held.bind(("127.0.0.1", 0))
        with pytest.raises(RankLost, match=r"the store of the ranks is not found at 127\.0\.0\.1"):
            Rendezvous.join("127.0.0.1", held.getsockname()[1], "s")
    store = RemoteStore("127.0.0.1", (server := Server(b"s")).port, b"s")
    with pytest.raises(NoValue, match=r"no value of x came within"):
        store.wait(["x"], timedelta(seconds=0.01))
    assert server.values.add("x", 1) == store.add("x", 0) == 1


def test_what_is_no_request_ends_its_connection_alone() -> None:
    first = Rendezvous.open(dict(LOCAL))
    link = connect("127.0.0.1", [first.port], first.secret.encode(), RANKS, b"{}")
    link.send(b'["shell", "x"]')
    with pytest.raises(OSError, match="ended the connection"):
        link.receive(20)
    link.close()
    assert Rendezvous.join("127.0.0.1", first.port, first.secret).value("x") is None


def test_the_store_is_one_in_torch_s_own_terms() -> None:
    server = Server(b"s")
    store = RemoteStore("127.0.0.1", server.port, b"s")
    store.set("bytes", bytes(range(256)))
    assert store.get("bytes") == bytes(range(256)) == server.values.get("bytes")
    assert (store.check(["bytes"]), store.check(["bytes", "x"])) == (True, False)
    assert [store.compare_set("swapped", old, new) for old, new in (("", "a"), ("b", "c"), ("a", "c"))] == [
        b"a",
        b"a",
        b"c",
    ]
    assert (store.delete_key("swapped"), store.delete_key("swapped")) == (True, False)


def form(size: int, *, timeout_changes: bool, late_s: float = 0.0) -> list[Any]:
    """Form new groups over the store and hand over a state in them.

    The last rank comes `late_s` late to a collective of the last group, which is more than a formation may take.
    """
    rendezvous_module.gloo_timeout_changes = lambda: timeout_changes
    if late_s:
        rendezvous_module.FORM_WAIT = timedelta(seconds=late_s - 1)
    world = join(torch.device("cpu"))
    found: list[Any] = [None]
    rendezvous = Rendezvous.open() if world.rank == 0 else None
    if rendezvous is not None:
        found = [(rendezvous.address, rendezvous.port, rendezvous.secret)]
    dist.broadcast_object_list(found, src=0)
    rendezvous = rendezvous or Rendezvous.join(*found[0])
    dist.barrier()
    leave_groups()
    for generation in range(2):
        made: World = rendezvous.form(
            world, f"generation/{generation}", world.rank, size, per_node=size, lent=0
        )
        state = {"w": torch.arange(5)} if made.rank == 0 else None
        got = hand_over(state, made, [made.size - 1])
        total = torch.ones(1)
        if generation and made.rank == size - 1:
            time.sleep(late_s)
        dist.all_reduce(total)
        assert is_own(), "the agent ends it with the process"
        leave_groups()
    return [total.item(), None if got is None else got["w"].tolist(), made.places]


@pytest.mark.parametrize("timeout_changes", [gloo_timeout_changes(), False])
def test_process_groups_form_over_the_store(ranks: Any, timeout_changes: bool) -> None:
    results = ranks(3, partial(form, 3, timeout_changes=timeout_changes))
    assert [result[0] for result in results] == [3.0] * 3
    assert [result[1] for result in results] == [None, None, [0, 1, 2, 3, 4]]
    assert all(len(result[2]) == 3 for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("timeout_changes", [gloo_timeout_changes(), False])
def test_a_collective_may_take_longer_than_the_formation_of_its_group(
    ranks: Any, timeout_changes: bool
) -> None:
    results = ranks(2, partial(form, 2, timeout_changes=timeout_changes, late_s=5.0))
    assert [result[0] for result in results] == [2.0, 2.0]


@pytest.mark.parametrize("timeout_changes", [gloo_timeout_changes(), False])
def test_a_rank_that_does_not_come_is_lost(monkeypatch: pytest.MonkeyPatch, timeout_changes: bool) -> None:
    monkeypatch.setattr(rendezvous_module, "gloo_timeout_changes", lambda: timeout_changes)
    monkeypatch.setattr(rendezvous_module, "FORM_WAIT", timedelta(seconds=1))
    rendezvous = Rendezvous.open(dict(LOCAL))
    world = World(0, 1, 1, torch.device("cpu"), None)
    with pytest.raises(RankLost):
        rendezvous.form(world, "generation/1", 0, 2, per_node=2, lent=0)
    leave_groups()
