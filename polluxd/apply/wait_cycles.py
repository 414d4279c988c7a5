"""Find moves that wait for each other in a ring.

For example, A waits for GPUs that B holds, and B waits for GPUs that A holds.
"""

from __future__ import annotations

from collections.abc import Iterable

from polluxd.apply.capacity import Capacity
from polluxd.model import Move, Step


def wait_cycle(moves: Iterable[Move], room: Capacity) -> list[Move]:
    """Return the planned moves that fit once all their jobs free their GPUs.

    Only moves of running jobs count. The list is empty if no such moves exist. If no move of the ring can begin by
    itself, one job has to give up its GPUs before the GPUs of its target are free.
    """
    ring = [m for m in moves if m.step is Step.PLANNED and m.source and m.target]
    while ring:
        left = room.free.copy()
        left.update(room.leaving)  # a Counter's update adds
        for move in ring:
            for name in move.source.nodes:
                left[name] += move.source.gpus_per_node
            for name in move.target.nodes:
                left[name] -= move.target.gpus_per_node
        short = {name for name, gpus in left.items() if gpus < 0} | room.closed
        blocked = [m for m in ring if short.intersection(m.target.nodes)]
        if not blocked:
            return ring
        ring.remove(max(blocked, key=lambda m: m.target.gpus - m.source.gpus))
    return []
