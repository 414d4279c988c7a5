"""A rank that leaves its groups waits for no collective in them."""

from __future__ import annotations

import gc
import os
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from pollux.noise.noise_scale import SampleKind
from pollux.noise.samples import SampleBuffer, added
from pollux.ranks.connections import keep_groups
from tests.unit.agent.killing import exit_codes, forked


def leave_a_reduction(rank: int, meeting: Path) -> int:
    """Rank 1 never comes to the reduction; rank 0 leaves the group."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(str(meeting), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(minutes=30))
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
