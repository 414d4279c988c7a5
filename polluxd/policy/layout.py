"""Hold the nodes as arrays that do not depend on where jobs sit.

The arrays stay valid as long as the nodes do not change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polluxd.model import Node, Placement
from polluxd.policy.domains import classes, eligible, racks

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

Seat = tuple[tuple[int, ...], int]
"""Node numbers and GPUs on each."""

NOWHERE: Seat = ((), 0)
_UNLIMITED = 1 << 40


class Layout:
    """Nodes by number; nobody changes what is in it."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.capacity: Ints = np.array([n.capacity for n in nodes], dtype=np.int64)
        """Per node, GPUs that our jobs may hold."""
        self.cpus: Ints = np.array(
            [max(n.cpus - n.foreign_cpus, 0) if n.cpus > 0 else _UNLIMITED for n in nodes], dtype=np.int64
        )
        self.memory: Ints = np.array(
            [max(n.memory_mb - n.foreign_memory_mb, 0) if n.memory_mb > 0 else _UNLIMITED for n in nodes],
            dtype=np.int64,
        )
        self.classes = [(size, np.array(numbers)) for (_, size), numbers in classes(nodes).items()]
        """Size and node numbers of each class: a multi-node placement stays within one."""
        number = {name: i for i, name in enumerate(racks(nodes))}
        self.rack: Ints = np.array([number.get(n.rack, -1) for n in nodes], dtype=np.int64)
        """Per node, the number of its rack; -1 where there is but one."""
        self.position: Ints = np.array([n.position for n in nodes], dtype=np.int64)
        """Per node, its place in Slurm's order."""
        self._number = {n.name: i for i, n in enumerate(nodes)}
        self._allowed: dict[frozenset[str], Bools] = {}

    def allowed(self, partitions: frozenset[str]) -> Bools:
        """Nodes that these partitions allow."""
        found = self._allowed.get(partitions)
        if found is None:
            found = np.array([eligible(partitions, n) for n in self.nodes], dtype=np.bool_)
            self._allowed[partitions] = found
        return found

    @cached_property
    def of_type(self) -> dict[str, Bools]:
        """Nodes of each GPU type."""
        return {
            kind: np.array([n.gpu_type == kind for n in self.nodes], dtype=np.bool_)
            for kind in {n.gpu_type for n in self.nodes}
        }

    def seat(self, placement: Placement) -> Seat:
        """The seat that a placement is, as far as its nodes are known here."""
        nodes, number = placement.nodes, self._number
        if len(nodes) == 1:
            own = number.get(nodes[0])
            return NOWHERE if own is None else ((own,), placement.gpus_per_node)
        if not nodes:
            return NOWHERE
        numbers = tuple(sorted(number[n] for n in nodes if n in number))
        return (numbers, placement.gpus_per_node) if numbers else NOWHERE
