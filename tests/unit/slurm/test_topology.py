"""Racks from `scontrol show topology` and from node lists.

The output is that of Slurm 22.05.
"""

from __future__ import annotations

import pytest

from polluxd.errors import SlurmGarbled
from polluxd.slurm.topology import parse_topology, racks_of

TREE = (
    "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]\n"
    "SwitchName=s2 Level=0 LinkSpeed=1 Nodes=n[3-4],gpu-a\n"
    "SwitchName=bare Level=0 LinkSpeed=1\n"
    "SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-4],gpu-a Switches=s[1-2]\n"
)


def test_nodes_hang_on_their_leaf_switch() -> None:
    assert parse_topology(TREE) == {"n1": "s1", "n2": "s1", "n3": "s2", "n4": "s2", "gpu-a": "s2"}


@pytest.mark.parametrize("text", ["", "\n", "No topology information available\n"])
def test_no_topology_is_no_racks(text: str) -> None:
    assert parse_topology(text) == {}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("BlockName=b1 BlockIndex=0 Nodes=n[1-4]\n", "as topology/tree has them, got 'BlockName=b1"),
        (TREE[:60], "got 'SwitchName=s2"),
        ("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-\n", "expected a node list"),
        (TREE + "SwitchName=s3 Level=0 LinkSpeed=1 Nodes=n4\n", "n4 hangs on two leaf switches, s2 and s3"),
    ],
)
def test_anything_else_is_told(text: str, what: str) -> None:
    with pytest.raises(SlurmGarbled, match=what):
        parse_topology(text)


def test_racks_by_node_list() -> None:
    assert racks_of({"r1": "n[1-2]", "r2": "n9,m1"}) == {"n1": "r1", "n2": "r1", "n9": "r2", "m1": "r2"}
    assert racks_of({}) == {}


@pytest.mark.parametrize(
    ("lists", "what"),
    [
        ({"r1": "n[1-2]", "r2": "n2"}, "node n2 is in two racks, r1 and r2"),
        ({"r1": "n[1-"}, "rack r1: expected a node list"),
        ({"r1": ""}, "rack r1: expected a node list such as"),
    ],
)
def test_node_lists_that_make_no_sense(lists: dict[str, str], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        racks_of(lists)
