"""Choose which nodes a job keeps when it shrinks or grows.

The objective makes no difference between nodes of one kind, so another job can take any of them. For Slurm they
differ: the job's batch script runs on one node, and companion jobs lend others. If the job keeps the right nodes, it
changes its size within its allocation. Otherwise it has to go through the queue.
"""

from __future__ import annotations

from collections.abc import Sequence

from polluxd.model import Node, Placement
from polluxd.policy.layout import NOWHERE
from polluxd.policy.packing import Packing


def leave_right_nodes(packing: Packing) -> None:
    """Exchange nodes so that jobs that change their size keep the right ones.

    A job that shrinks must keep the first nodes of `SnapshotJob.keeps`, a job that grows must keep all its nodes. The
    job exchanges nodes with the job that would take its node, and only if the two nodes are of the same kind.
    """
    for j, job in enumerate(packing.jobs):
        (own, per_node), (home, before) = packing.seats[j], packing.home[j]
        if job.pinned or not own or per_node != before or len(own) == len(home):
            continue
        wanted = home
        if len(own) < len(home):
            if not job.keeps:
                continue
            wanted, _ = packing.layout.seat(Placement(job.keeps[: len(own)], per_node))
        given = sorted(set(own) - set(wanted))
        for b in sorted(set(wanted) - set(own)):
            for a in given:
                if _exchange(packing, j, a, b):
                    given.remove(a)
                    break


def _exchange(packing: Packing, j: int, a: int, b: int) -> bool:
    """Seat the job on node `b` instead of `a`, and the jobs due on `b` on `a`.

    Returns False, and changes nothing, where the nodes differ, or where another job sits on `b` now or may not move to
    `a`.
    """
    others = [i for i in packing.guests[b] if i != j]
    alone = set(packing.guests[a]) == {j} and j not in packing.guests[b]
    if not alone or not _alike(packing.nodes[a], packing.nodes[b]):
        return False
    if any(packing.jobs[i].contiguous and len(packing.seats[i][0]) > 1 for i in (j, *others)):
        return False
    if any(packing.jobs[i].pinned or b in packing.home[i][0] or not packing.allowed(i)[a] for i in others):
        return False
    moved = [(i, packing.seats[i], (a, b) if i == j else (b, a)) for i in (j, *others)]
    for i, _, _ in moved:
        packing.put(i, NOWHERE)
    for i, (numbers, per_node), (old, new) in moved:
        packing.put(i, (_with(numbers, old, new), per_node))
    return True


def _with(numbers: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(sorted(new if n == old else n for n in numbers))


def _alike(a: Node, b: Node) -> bool:
    """Whether the two nodes are the same for every job."""
    return _kind(a) == _kind(b)


def _kind(node: Node) -> tuple[object, ...]:
    return (
        *(node.gpus, node.gpu_type, node.foreign_gpus, node.schedulable),
        *(node.partitions, node.cpus, node.foreign_cpus, node.rack),
        *(node.memory_mb, node.foreign_memory_mb),
    )
