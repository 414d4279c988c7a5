"""The count solver: GPUs per job, exactly, by dynamic programming.

It knows nothing of placement.

With one GPU type this is a multiple-choice knapsack: each job picks one of its options, the GPUs add up to at most
the capacity, the utilities add up to as much as possible. Its value bounds every plan from above, since placement
can only take away. Ceilings and guarantees of nested groups of jobs are programs within the program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from polluxd.policy.owners import Group

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_Assign = Callable[[int, Ints], None]
"""Writes the options of some jobs, given the GPUs that they have together."""


def owners(start: Ints) -> Ints:
    """Return the owner's number of each option [O]; `start` delimits them."""
    return np.repeat(np.arange(start.size - 1), start[1:] - start[:-1])


def frontiers(gpus: Ints, value: Floats, owner: Ints) -> Ints:
    """Return the options worth having, by owner [O] and GPUs.

    Each is better than every option of its owner that needs no more GPUs.

    Indices into the arrays, all owners' in one pass; of equal options the first.
    """
    order = np.lexsort((np.arange(gpus.size), -value, gpus, owner))
    # A higher value has a higher rank; of equal values, the first has. Each owner's ranks lie above the ranks of all
    # owners before it, so one running maximum serves all owners.
    number = np.arange(gpus.size)
    rank = np.empty_like(number)
    rank[np.lexsort((-number, value[order]))] = number
    rank += owner[order] * gpus.size
    keep = np.ones(order.size, dtype=np.bool_)
    keep[1:] = rank[1:] > np.maximum.accumulate(rank)[:-1]
    return order[keep]


def solve(
    gpus: Ints, value: Floats, start: Ints, capacity: int, groups: Sequence[Group] = ()
) -> tuple[Ints, float]:
    """Choose one option per job, of largest total value.

    They keep within `capacity` GPUs and the limits of `groups`, which are nested.

    Options are grouped by job, `start` [J + 1] delimits them in `gpus` and `value` [O]; every job has one that needs
    no GPU. A guarantee is kept for its group as far as the group has use for it. Returns option numbers [J] and the
    total. O(options * capacity) time; ties go to fewer GPUs, always alike.
    """
    jobs = start.size - 1
    chosen = np.zeros(jobs, dtype=np.int64)
    if jobs == 0:
        return chosen, 0.0
    capacity = int(min(capacity, np.maximum.reduceat(gpus, start[:-1]).sum()))
    tables = _Tables(gpus, value, start)
    # The smallest group first: the tables of the groups inside a group are then made already.
    made: list[tuple[frozenset[int], Group, Floats, _Assign]] = []
    for group in sorted(groups, key=lambda g: len(g.members)):
        inner = [m for m in made if m[0] <= frozenset(group.members)]
        made = [m for m in made if m not in inner]
        table, assign = tables.of(group.members, inner, min(capacity, group.ceiling))
        made.append((frozenset(group.members), group, table, assign))
    best, assign = tables.of(range(jobs), made, capacity)
    # The least capacity that reaches the top value: GPUs that bring nothing stay free.
    left = int(np.argmax(best))
    assign(left, chosen)
    return chosen, float(best[left])


class _Tables:
    """Best total value by the GPUs that some jobs may have together.

    [capacity + 1]
    """

    def __init__(self, gpus: Ints, value: Floats, start: Ints) -> None:
        self._gpus, self._value = gpus, value
        owner = owners(start)
        self._worth = frontiers(gpus, value, owner)
        self._begin = np.searchsorted(owner[self._worth], np.arange(start.size))

    def of(
        self,
        members: Sequence[int],
        inner: Sequence[tuple[frozenset[int], Group, Floats, _Assign]],
        capacity: int,
    ) -> tuple[Floats, _Assign]:
        """Return the table of these jobs, inner groups by their own tables."""
        grouped = frozenset[int]().union(*(m[0] for m in inner))
        best = np.zeros(capacity + 1)
        stages: list[tuple[Ints, NDArray[np.int32], int, _Assign | None]] = []
        for j in members:
            if j in grouped:
                continue
            options = self._worth[self._begin[j] : self._begin[j + 1]]
            options = options[self._gpus[options] <= capacity]
            best, picked = _stage(best, self._gpus[options], self._value[options])
            stages.append((options, picked, j, None))
        unreserved = capacity
        for _, group, table, assign in inner:
            # The least capacity with which the group reaches its largest value. More capacity need not be tried.
            most = int(np.argmax(table))
            # Reserved for the group: the largest size within its guarantee that it can use. A job that needs more GPUs
            # than that keeps nobody else from them. The guarantees of other groups come first in their turn.
            reserved = int(np.argmax(table[: min(group.floor, unreserved) + 1]))
            unreserved -= reserved
            sizes = np.arange(reserved, min(most, capacity) + 1)
            best, picked = _stage(best, sizes, table[sizes])
            stages.append((sizes, picked, -1, assign))

        def hand_out(left: int, chosen: Ints) -> None:
            for options, picked, j, inside in reversed(stages):
                option = int(options[picked[left]])
                if inside is None:
                    chosen[j] = option
                    left -= int(self._gpus[option])
                else:
                    inside(option, chosen)
                    left -= option

        return best, hand_out


def _stage(best: Floats, sizes: Ints, values: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """Add one member: for each capacity, take its best choice.

    Choices are in order of size. Also returns the number of each best choice.
    """
    if sizes.size == 1 and sizes[0] == 0:
        return best + values[0], np.zeros(best.size, dtype=np.int32)
    columns = np.arange(best.size)
    reach = columns[None, :] - sizes[:, None]
    total = np.where(reach >= 0, best[np.maximum(reach, 0)] + values[:, None], -np.inf)
    picked = np.argmax(total, axis=0)
    return total[picked, columns], picked.astype(np.int32)
