"""A rank that leaves its groups waits for no collective in them."""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pollux.noise.noise_scale import SampleKind
from pollux.noise.samples import SampleBuffer, added
from pollux.ranks.connections import close_groups, forming_groups, keep_groups, tell_peers
from pollux.ranks.control import lost_peer
from pollux.ranks.rendezvous import until
from tests.unit.agent.killing import PATIENCE, exit_codes, forked


def two_ranks(rank: int, meeting: Path) -> dist.FileStore:
    """Form a group of two ranks, whose collectives wait for half an hour."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
    return store


def leave_a_reduction(rank: int, meeting: Path) -> int:
    """Rank 1 never comes to the reduction; rank 0 leaves the group."""
    store = two_ranks(rank, meeting)
    if rank == 1:
        store.wait(["left"])
        return 0
    buffer = SampleBuffer(1, torch.device("cpu"), rows=2, group=dist.group.WORLD)
    buffer.add(SampleKind(2, 1.0, 1.0), added(torch.ones(1)), added(torch.ones(1)))
    buffer.flush()
    keep_groups()
    dist.destroy_process_group()
    buffer.clear()
    del buffer
    gc.collect()
    store.set("left", "yes")
    return 0


def test_a_rank_leaves_a_group_in_which_a_reduction_never_ends(tmp_path: Path) -> None:
    ranks = [forked(lambda rank=rank: leave_a_reduction(rank, tmp_path / "meeting")) for rank in range(2)]
    assert exit_codes(ranks) == [0, 0]


def test_peers_are_told_on_connections_that_stay_open() -> None:
    # What a peer writes before it has read the end must not fail: gloo would never end the collective.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with forming_groups():
            here = socket.create_connection(listener.getsockname(), PATIENCE)
        there, _ = listener.accept()
    with here, there:
        there.sendall(b"unread")
        tell_peers({})
        there.sendall(b", and more")
        there.settimeout(PATIENCE)
        assert there.recv(1) == b""
        there.sendall(b", and still more")
        there.shutdown(socket.SHUT_WR)
        assert here.makefile("rb").read() == b"unread, and more, and still more"


def close_a_connection_that_gloo_does_not_read(rank: int, meeting: Path) -> int:
    """Rank 0 has given up the first of two messages before it comes."""
    store = two_ranks(rank, meeting)
    if rank == 1:
        store.wait(["posted"])
        sent = [dist.isend(torch.ones(1), dst=0, tag=tag) for tag in range(2)]
        assert all(work is not None and work.wait() for work in sent)
        store.set("sent", "yes")
        store.wait(["closed"])
        return 0
    given_up, awaited = (dist.irecv(torch.zeros(1), src=1, tag=tag) for tag in range(2))
    assert awaited is not None
    del given_up
    store.set("posted", "yes")
    store.wait(["sent"])
    close_groups()
    with pytest.raises(RuntimeError) as caught:
        awaited.wait(timedelta(seconds=PATIENCE / 2))
    assert lost_peer(caught.value)
    assert "Timed out" not in str(caught.value)
    assert until(at_rest, PATIENCE), "a thread of gloo asks without pause whether there is more to read"
    store.set("closed", "yes")
    return 0


def at_rest() -> bool:
    """This process uses next to no CPU while it sleeps."""
    used, begun = time.process_time(), time.monotonic()
    time.sleep(0.2)
    return time.process_time() - used < 0.05 * (time.monotonic() - begun)


def test_what_waits_for_a_connection_that_gloo_does_not_read_ends(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    ranks = [
        forked(lambda rank=rank: close_a_connection_that_gloo_does_not_read(rank, meeting)) for rank in (0, 1)
    ]
    assert exit_codes(ranks) == [0, 0]


FAILING = """
import sys, torch, torch.distributed as dist
from pollux.ranks.world import own_group
store = dist.FileStore(sys.argv[1], 2)
with own_group():
    dist.init_process_group("gloo", store=store, rank=int(sys.argv[2]), world_size=2)
if sys.argv[2] == "1":
    store.set("connected", "yes")
    store.wait(["failed"])
    sys.exit(0)
store.wait(["connected"])
work = dist.all_reduce(torch.ones(1), async_op=True)
raise ValueError("on purpose")
"""


def test_a_rank_that_fails_ends_while_a_collective_runs(tmp_path: Path) -> None:
    meeting = str(tmp_path / "meeting")
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", FAILING, meeting, str(rank)], env=environ) for rank in (0, 1)
    ]
    try:
        assert ranks[0].wait(PATIENCE) == 1
        dist.FileStore(meeting, 2).set("failed", "yes")
        assert ranks[1].wait(PATIENCE) == 0
    finally:
        for rank in ranks:
            rank.kill()
