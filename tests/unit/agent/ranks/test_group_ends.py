"""A rank that leaves its groups waits for no collective in them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pollux.noise.noise_scale import SampleKind
from pollux.noise.samples import SampleBuffer, added
from pollux.ranks.world import keep_groups
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
exec(sys.argv[3])
"""


@pytest.mark.parametrize("end", ["raise ValueError('on purpose')", "sys.exit(1)"])
def test_a_rank_that_ends_waits_for_no_collective(tmp_path: Path, end: str) -> None:
    meeting = str(tmp_path / "meeting")
    environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", FAILING, meeting, str(rank), end], env=environ)
        for rank in (0, 1)
    ]
    try:
        assert ranks[0].wait(PATIENCE) == 1
        dist.FileStore(meeting, 2).set("failed", "yes")
        assert ranks[1].wait(PATIENCE) == 0
    finally:
        for rank in ranks:
            rank.kill()
