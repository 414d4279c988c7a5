"""What a rank learns about its place in the job."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from pollux.ranks.world import join


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
