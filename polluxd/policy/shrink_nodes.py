"""Which of its nodes a job that shrinks is left with: those that let it shrink within its allocation.

Nodes of a kind are the same to the objective, so whoever comes in may as well take another one of those that the job
holds. To Slurm they are not: the job's batch script runs on one of them, and companions lend some. Left with the wrong
ones, the job has to go through the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from polluxd.model import Node, Placement
from polluxd.policy.layout import NOWHERE
from polluxd.policy.packing import Packing


def leave_right_nodes(packing: Packing) -> None:
    """Exchange nodes of jobs that shrink (`Job.keeps`) with whoever is to take the others, where nodes are alike."""
    for j, job in enumerate(packing.jobs):
        (own, per_node), (home, before) = packing.seats[j], packing.home[j]
        if not job.keeps or job.pinned or not own or per_node != before or not set(own) < set(home):
            continue
        wanted, _ = packing.layout.seat(Placement(job.keeps[: len(own)], per_node))
        given = sorted(set(own) - set(wanted))
        taken = sorted(set(wanted) - set(own))
        if len(given) == len(taken):
            for a, b in zip(given, taken, strict=True):
                _exchange(packing, j, a, b)
    packing.forget()


def _exchange(packing: Packing, j: int, a: int, b: int) -> None:
    """Have the job sit on node `b` instead of `a`, and who was to come to `b` on `a`; not where others sit now."""
    others = [i for i in packing.guests[b] if i != j]
    alone = set(packing.guests[a]) == {j} and j not in packing.guests[b]
    if not alone or not _alike(packing.nodes[a], packing.nodes[b]):
        return
    if any(packing.jobs[i].pinned or b in packing.home[i][0] or not packing.allowed(i)[a] for i in others):
        return
    moved = [(i, packing.seats[i], (a, b) if i == j else (b, a)) for i in (j, *others)]
    for i, _, _ in moved:
        packing.put(i, NOWHERE)
    for i, (numbers, per_node), (old, new) in moved:
        packing.put(i, (_with(numbers, old, new), per_node))


def _with(numbers: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted(new if n == old else n for n in numbers))


def _alike(a: Node, b: Node) -> bool:
    """Whether nothing depends on which of the two a job is on."""
    return _kind(a) == _kind(b)


def _kind(node: Node) -> tuple[object, ...]:
    return (
        *(node.gpus, node.gpu_type, node.foreign_gpus, node.schedulable),
        *(node.partitions, node.cpus, node.foreign_cpus, node.rack),
    )
