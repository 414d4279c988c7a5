"""Racks: the leaf switches of `scontrol show topology`.

Slurm prints one record per line (TopologyPlugin=topology/tree):

SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-8]
SwitchName=top Level=1 LinkSpeed=1 Nodes=n[1-16] Switches=s[1-2]
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from polluxd.errors import SlurmGarbled
from polluxd.slurm.notation import node_names

_NONE = "No topology information available"
_SWITCH = re.compile(
    r"SwitchName=(?P<name>\S+) Level=(?P<level>\d{1,9}) LinkSpeed=\S+(?P<rest>( \S+=\S*)*)\s*"
)
_NODES = re.compile(r" Nodes=(\S+)")


def parse_topology(text: str) -> dict[str, str]:
    """The leaf switch of each node; empty where Slurm knows no topology. Raises SlurmGarbled."""
    leaf: dict[str, str] = {}
    for line in text.splitlines():
        if not line.strip() or line.strip() == _NONE:
            continue
        found = _SWITCH.fullmatch(line)
        if found is None:
            raise SlurmGarbled(
                "scontrol show topology: expected SwitchName= Level= LinkSpeed= Nodes=, as topology/tree has them, "
                f"got {line[:80]!r}"
            )
        if int(found["level"]) > 0:
            continue
        named = _NODES.search(found["rest"])
        for node in node_names(named[1]) if named else ():
            if leaf.setdefault(node, found["name"]) != found["name"]:
                raise SlurmGarbled(
                    f"scontrol show topology: node {node} hangs on two leaf switches, {leaf[node]} and {found['name']}"
                )
    return leaf


def racks_of(lists: Mapping[str, str]) -> dict[str, str]:
    """Return the rack of each node, from node lists by rack.

    `lists` is such as `{"r1": "n[1-8]"}`.

    Raises:
        ValueError: a text is no node list, or a node is in two racks.
    """
    rack: dict[str, str] = {}
    for name, nodes in lists.items():
        try:
            members = node_names(nodes)
        except SlurmGarbled as error:
            raise ValueError(f"rack {name}: {error}") from None
        if not members:
            raise ValueError(f"rack {name}: expected a node list such as n[1-8], got {nodes!r}")
        for node in members:
            if rack.setdefault(node, name) != name:
                raise ValueError(f"node {node} is in two racks, {rack[node]} and {name}")
    return rack
