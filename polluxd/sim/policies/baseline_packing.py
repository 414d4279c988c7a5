"""Place counts of GPUs as the artifact's baselines do.

GPUs always come from the node with the most free GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polluxd.sim.engine import View
from polluxd.sim.simulated_job import Seats


def only(view: View, gpu_type: str) -> tuple[int, ...]:
    """The nodes' capacity, 0 for those of other GPU types."""
    if not view.scenario.groups:
        return view.capacity
    return tuple(
        room if kind == gpu_type else 0 for room, kind in zip(view.capacity, view.scenario.types, strict=True)
    )


def free_gpus(capacity: Sequence[int], held: Mapping[int, Seats]) -> list[int]:
    """GPUs left on each node."""
    free = list(capacity)
    for seats in held.values():
        for node, gpus in seats:
            free[node] -= gpus
    return free


def emptiest_first(free: list[int], gpus: int) -> Seats:
    """Take seats for so many GPUs from `free`, emptiest node first.

    The node with the most free GPUs comes first, on a tie the one with the lower number. Where there are too few
    GPUs, nothing is taken and the result is empty.
    """
    if sum(free) < gpus:
        return ()
    seats: list[tuple[int, int]] = []
    while gpus > 0:
        node = max(range(len(free)), key=free.__getitem__)
        taken = min(free[node], gpus)
        seats.append((node, taken))
        free[node] -= taken
        gpus -= taken
    return tuple(seats)


def still_fits(seats: Seats, capacity: Sequence[int]) -> bool:
    """Whether every node of the seats is still in service."""
    return bool(seats) and all(capacity[node] >= gpus for node, gpus in seats)


def seated(wanted: Mapping[int, int], held: Mapping[int, Seats], capacity: Sequence[int]) -> dict[int, Seats]:
    """Seat so many GPUs per job, in the order given.

    A job with the same count as before keeps its seats. A job that finds too few GPUs gets none.
    """
    kept = {
        n: held[n]
        for n, gpus in wanted.items()
        if gpus and sum(g for _, g in held.get(n, ())) == gpus and still_fits(held[n], capacity)
    }
    free = free_gpus(capacity, kept)
    for number, gpus in wanted.items():
        if gpus and number not in kept:
            seats = emptiest_first(free, gpus)
            if seats:
                kept[number] = seats
    return kept


def compact(
    wanted: Mapping[int, int], held: Mapping[int, Seats], capacity: Sequence[int]
) -> dict[int, Seats]:
    """Seat jobs of up to a node on one node, and larger jobs on whole nodes.

    A job with the same count as before keeps its seats. Where these seats leave no room for some job, all jobs are
    placed again. A job that still finds no room gets no seats.
    """
    size = max(capacity, default=0)
    same = {
        n: seats
        for n, seats in held.items()
        if wanted.get(n, 0) and sum(g for _, g in seats) == wanted[n] and still_fits(seats, capacity)
    }
    found: dict[int, Seats] = {}
    for kept in (same, {}):
        found = dict(kept)
        free = free_gpus(capacity, found)
        for number in sorted(wanted, key=lambda n: -wanted[n]):
            gpus = wanted[number]
            if not gpus or number in found:
                continue
            if gpus <= size:
                # The fullest node that has room: larger jobs want the empty ones.
                roomy = [node for node in range(len(free)) if free[node] >= gpus]
                seats: Seats = ((min(roomy, key=free.__getitem__), gpus),) if roomy else ()
            else:
                empty = [node for node in range(len(free)) if free[node] == size][: gpus // size]
                seats = tuple((node, size) for node in empty) if len(empty) * size == gpus else ()
            if seats:
                found[number] = seats
                for node, taken in seats:
                    free[node] -= taken
        if all(n in found for n, gpus in wanted.items() if gpus):
            return found
    return found
