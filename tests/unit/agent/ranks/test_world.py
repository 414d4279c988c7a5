"""What a rank learns about its place in the job."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pollux.errors import LaunchError, RankLost
from pollux.ranks import world
from pollux.ranks.world import backend_for, join
from tests.unit.agent.killing import exit_codes, forked


def racks(addresses: list[str]) -> int:
    os.environ["SLURM_TOPOLOGY_ADDR"] = addresses[int(os.environ["RANK"])]
    return join(torch.device("cpu")).racks


@pytest.mark.parametrize(
    ("addresses", "count"),
    [
        (["core.r1.n1", "core.r1.n2", "core.r2.n3"], 2),
        (["core.r1.n1", "core.r1.n1", "core.r1.n2"], 1),
        (["n1", "n2", "n3"], 1),  # without topology/tree the address is the node's name
        (["", "", ""], 1),
    ],
)
def test_racks_are_the_leaf_switches_of_slurms_topology(ranks: Any, addresses: list[str], count: int) -> None:
    assert ranks(3, racks, addresses) == [count] * 3


@pytest.mark.parametrize(
    ("chosen", "device", "backend"), [("", "cuda", "nccl"), ("gloo", "cuda", "gloo"), ("nccl", "cpu", "gloo")]
)
def test_tests_choose_gloo_where_ranks_share_a_gpu(
    chosen: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLLUX_BACKEND", chosen)
    assert backend_for(torch.device(device)) == backend


@pytest.mark.parametrize(
    ("name", "value"), [("POLLUX_BACKEND", "mpi"), ("WORLD_SIZE", "two"), ("WORLD_SIZE", "0")]
)
def test_what_no_rank_can_use_is_an_error(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", name: value}
    for variable, word in ranks.items():
        monkeypatch.setenv(variable, word)
    with pytest.raises(LaunchError, match=f"expected {name} to be .*got '{value}'"):
        join(torch.device("cpu"))


def join_or_die(rank: int, port: int, dies: bool, module: Any, name: str) -> int:
    """Return 0 where the rank was told that another one is lost."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if dies:
        setattr(module, name, lambda *_, **__: os._exit(9))
    try:
        join(torch.device("cpu"))
    except RankLost:
        return 0
    return 1


@pytest.mark.parametrize(
    ("victim", "module", "name"),
    [
        (0, dist.distributed_c10d, "ProcessGroupGloo"),
        (0, dist, "new_group"),
        (0, world, "where"),
        (1, world, "where"),
    ],
)
def test_a_rank_that_ends_while_groups_are_formed_is_lost(
    victim: int, module: Any, name: str, free_port: Callable[[], int]
) -> None:
    port = free_port()
    bodies = [partial(join_or_die, rank, port, rank == victim, module, name) for rank in range(2)]
    assert exit_codes([forked(body) for body in bodies]) == [9 if rank == victim else 0 for rank in range(2)]
