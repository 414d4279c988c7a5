"""List the shapes that a placement may have.

A placement has 1 to g GPUs on one node; beyond that, whole nodes. With `partial_nodes` it may also have equal parts
of nodes, on as few nodes as the count needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from polluxd.config.value_types import replica
from polluxd.model import JobSpec, Node
from polluxd.policy.domains import classes

DENSE = 16
"""Up to this many nodes, every node count is a shape; beyond, they are spaced by an eighth."""


ANYWHERE, ONE_RACK, OVER_RACKS = 0, 1, 2
"""How a shape's nodes lie in racks: in any way, all in one rack, in two or more racks."""


class Shape(NamedTuple):
    """`nodes` nodes with `per_node` GPUs each.

    The GPUs are of one type, or of any type (None). `racks` says how the nodes lie in racks.
    """

    nodes: int
    per_node: int
    gpu_type: str | None = None
    racks: int = ANYWHERE

    @property
    def gpus(self) -> int:
        return self.nodes * self.per_node


def spaced(most: int) -> list[int]:
    """Return node counts from 2 to `most`, the last included.

    All counts up to `DENSE` are listed. Beyond, counts grow in steps of about an eighth.
    """
    counts: list[int] = []
    n = 2
    while n < most:
        counts.append(n)
        n += 1 if n < DENSE else n // 8
    return [*counts, most] if most >= 2 else counts


Stock = list[tuple[int, tuple[int, ...]]]
"""Per class of nodes: its size, and how many of its nodes have room for at least 0, 1, 2 ... GPUs of a job."""


def stock(nodes: Sequence[Node], spec: JobSpec) -> Stock:
    """The room on the nodes for a job if no other Pollux job ran."""
    found: Stock = []
    for (_, size), numbers in classes(nodes).items():
        exactly = [0] * (size + 1)
        for i in numbers:
            room = min(_cpu_room(nodes[i], spec), _memory_room(nodes[i], spec.mem_per_gpu_mb or 0))
            exactly[min(nodes[i].capacity, room)] += 1
        found.append((size, tuple(sum(exactly[k:]) for k in range(size + 1))))
    return found


def available(
    offered: Stock, *, partial: bool, lowest: int = 1, highest: int | None = None, rules: Sequence[str] = ()
) -> list[Shape]:
    """Shapes of `lowest` to `highest` GPUs that the stock could hold.

    Sorted by GPUs, then nodes. The smallest and the largest whole-node shapes within the limits are always among
    them, however coarse the spacing, and so is every count that one of the `rules` names; see `allows`.
    """
    found: set[Shape] = set()
    for size, roomy in offered:
        here = {Shape(1, k) for k in range(1, size + 1) if roomy[k]}
        for per_node in range(1, size + 1) if partial else (size,):
            count = roomy[per_node]
            top = count * per_node if highest is None else highest
            wanted = [*spaced(min(count, top // per_node)), -(-lowest // per_node), top // per_node]
            wanted += [k // per_node for rule in rules for k in named(rule, top) if k % per_node == 0]
            # Equal parts only where fewer nodes would not do.
            here.update(
                Shape(n, per_node) for n in wanted if 2 <= n <= count and (n - 1) * size < n * per_node
            )
        found.update(s for s in here if all(allows(rule, s, whole=s.per_node == size) for rule in rules))
    top = max((s.gpus for s in found), default=0) if highest is None else highest
    return sorted((s for s in found if lowest <= s.gpus <= top), key=lambda s: (s.gpus, s.nodes))


ANY, POWERS, WHOLE = "any", "powers-of-two", "whole-nodes"


def named(rule: str, top: int) -> list[int]:
    """Return the counts up to `top` that a rule names one by one.

    The list is empty for a rule that names none.
    """
    if rule == POWERS:
        return [1 << power for power in range(max(top, 0).bit_length())]
    if unit := replica(rule):
        return list(range(unit, top + 1, unit))
    return [int(n) for n in rule.split(",") if n.strip().isdigit()]


def allows(rule: str, shape: Shape, *, whole: bool) -> bool:
    """Return whether a rule on GPU counts allows the shape.

    For the rules see `JobSpec.gpu_counts`. `whole`: the shape takes whole nodes. A rule that names no count allows
    all counts, because directives are checked at submission. A replica that fits a node lies on one node, and a larger
    one takes whole nodes.
    """
    if rule == POWERS:
        return shape.gpus & (shape.gpus - 1) == 0
    if rule == WHOLE:
        return whole
    if unit := replica(rule):
        return shape.per_node % unit == 0 or (whole and shape.per_node < unit and shape.gpus % unit == 0)
    listed = named(rule, shape.gpus)
    return not listed or shape.gpus in listed


def _cpu_room(node: Node, spec: JobSpec) -> int:
    """Return the GPUs that the node's cores free of foreign jobs can serve.

    Where CPUs are unknown they set no limit.
    """
    if node.cpus <= 0 or spec.cpus_per_gpu <= 0:
        return node.gpus
    cores = max(node.cpus - node.foreign_cpus, 0) // node.cpus_per_core
    return cores * (1 if spec.one_thread else node.cpus_per_core) // spec.cpus_per_gpu


def _memory_room(node: Node, memory_per_gpu: int) -> int:
    """Return the GPUs that the memory free of foreign jobs can serve.

    Where the memory is unknown it sets no limit.
    """
    if node.memory_mb <= 0 or memory_per_gpu <= 0:
        return node.gpus
    return max(node.memory_mb - node.foreign_memory_mb, 0) // memory_per_gpu


def bare(node: Node) -> Node:
    """Return the node as schedulable and without foreign jobs."""
    return replace(node, foreign_gpus=0, foreign_cpus=0, foreign_memory_mb=0, schedulable=True)
