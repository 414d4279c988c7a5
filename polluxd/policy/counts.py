"""The count solver: how many GPUs each job gets, placement aside. Exact, by dynamic programming.

With one GPU type this is a multiple-choice knapsack: each job picks one of its options, the GPUs add up to at most
the capacity, the utilities add up to as much as possible. Its value bounds every plan from above, since placement
can only take away.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def frontier(gpus: Ints, value: Floats) -> Ints:
    """Options worth having, by GPUs: each is better than every one that needs no more. Indices into the arrays."""
    order = np.lexsort((np.arange(gpus.size), -value, gpus))
    best = np.maximum.accumulate(value[order])
    keep = np.ones(order.size, dtype=np.bool_)
    keep[1:] = value[order][1:] > best[:-1]
    return order[keep]


def solve(gpus: Ints, value: Floats, start: Ints, capacity: int) -> tuple[Ints, float]:
    """One option per job, of largest total value within `capacity` GPUs.

    Options are grouped by job, `start` [J + 1] delimits them in `gpus` and `value` [O]; every job has one that needs
    no GPU. Returns option numbers [J] and the total. O(options * capacity) time; ties go to fewer GPUs, and among
    jobs to the later in order, always alike.
    """
    jobs = start.size - 1
    capacity = int(min(capacity, _useful(gpus, start)))
    columns = np.arange(capacity + 1)
    best = np.zeros(capacity + 1)
    picked = np.zeros((jobs, capacity + 1), dtype=np.int32)
    kept: list[Ints] = []
    for j in range(jobs):
        options = start[j] + frontier(gpus[start[j] : start[j + 1]], value[start[j] : start[j + 1]])
        options = options[gpus[options] <= capacity]
        kept.append(options)
        if options.size == 1:
            best = best + value[options[0]]
            continue
        reach = columns[None, :] - gpus[options][:, None]
        total = np.where(reach >= 0, best[np.maximum(reach, 0)] + value[options][:, None], -np.inf)
        choice = np.argmax(total, axis=0)
        picked[j] = choice
        best = total[choice, columns]
    chosen = np.zeros(jobs, dtype=np.int64)
    # The least capacity that reaches the top value: GPUs that bring nothing stay free.
    left = int(np.argmax(best))
    value_found = float(best[left])
    for j in range(jobs - 1, -1, -1):
        chosen[j] = kept[j][picked[j, left]]
        left -= int(gpus[chosen[j]])
    return chosen, value_found


def _useful(gpus: Ints, start: Ints) -> int:
    """GPUs that all jobs together could take."""
    if start.size < 2:
        return 0
    return int(np.maximum.reduceat(gpus, start[:-1]).sum())
