"""Search for the static sizes under which plain Slurm would end the trainings soonest on average.

No user of plain Slurm could find them: the search knows all trainings and their arrivals beforehand. It says what a
policy that never changes a size reaches at best, by a model of Slurm: first come, first served, and a later job starts
first where it delays none before it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from .workload import Size, Workload

Sizes = Mapping[str, Size]
Seconds = Mapping[str, Mapping[Size, float]]
"""By training: how long it takes on each of its sizes."""


def best_static(work: Workload, seconds: Seconds, starts: Iterable[Sizes]) -> dict[str, Size]:
    """Return the best sizes that are found from each of `starts` by changing one training's size at a time."""

    def mean_jct(sizes: Sizes) -> float:
        return fmean(completions(work, sizes, seconds).values())

    return min((_descend(start, seconds, mean_jct) for start in starts), key=mean_jct)


def _descend(start: Sizes, seconds: Seconds, mean_jct: Callable[[Sizes], float]) -> dict[str, Size]:
    best, least = dict(start), mean_jct(start)
    while True:
        changes = [{**best, name: size} for name in best for size in seconds[name] if size != best[name]]
        further = min(changes, key=mean_jct, default=best)
        if mean_jct(further) >= least - 1e-9:
            return best
        best, least = further, mean_jct(further)


def completions(work: Workload, sizes: Sizes, seconds: Seconds) -> dict[str, float]:
    """Return the completion time of each training under plain Slurm [s]."""
    waiting = sorted(work.trainings, key=lambda job: job.arrive_s)
    free = [work.gpus_per_node] * work.nodes
    running: list[tuple[float, str, list[tuple[int, int]]]] = []
    ends: dict[str, float] = {}
    now = 0.0
    while waiting or running:
        begins = math.inf
        for job in [job for job in waiting if job.arrive_s <= now]:
            size, room = sizes[job.name], _room(sizes[job.name], free)
            took = seconds[job.name][size]
            if room is None:
                # No later job may delay the first one that waits.
                begins = min(begins, _begins(size, free, running))
                continue
            if now + took > begins:
                continue
            for node, gpus in room:
                free[node] -= gpus
            ends[job.name] = now + took
            heapq.heappush(running, (now + took, job.name, room))
            waiting.remove(job)
        arrivals = [job.arrive_s for job in waiting if job.arrive_s > now]
        if running and (not arrivals or running[0][0] <= min(arrivals)):
            now, _, held = heapq.heappop(running)
            for node, gpus in held:
                free[node] += gpus
        else:
            now = min(arrivals)
    arrived = {job.name: job.arrive_s for job in work.trainings}
    return {name: end - arrived[name] for name, end in ends.items()}


def _room(size: Size, free: Sequence[int]) -> list[tuple[int, int]] | None:
    """Return (node, GPUs) of a place for the job, in the fullest nodes that have room; None: there is none."""
    fit = sorted((gpus, node) for node, gpus in enumerate(free) if gpus >= size.gpus_per_node)
    return [(node, size.gpus_per_node) for _, node in fit[: size.nodes]] if len(fit) >= size.nodes else None


def _begins(
    size: Size, free: Sequence[int], running: Iterable[tuple[float, str, list[tuple[int, int]]]]
) -> float:
    """Return when the job has room, if nothing else starts."""
    left = list(free)
    for at, _, held in sorted(running):
        for node, gpus in held:
            left[node] += gpus
        if _room(size, left) is not None:
            return at
    raise ValueError(f"the cluster has no room for {size.nodes} nodes of {size.gpus_per_node} GPUs")
