"""Placing counts of GPUs as the artifact's baselines do: always on the node with the most free GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polluxd.sim.training import Seats


def free_gpus(capacity: Sequence[int], held: Mapping[int, Seats]) -> list[int]:
    """GPUs left on each node."""
    free = list(capacity)
    for seats in held.values():
        for node, gpus in seats:
            free[node] -= gpus
    return free


def emptiest_first(free: list[int], gpus: int) -> Seats:
    """Seats for so many GPUs, taken from `free`: the node with the most free first, the lower number on a tie.

    Nothing is taken, and nothing returned, where there are too few.
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


def standing(seats: Seats, capacity: Sequence[int]) -> bool:
    """Whether every node of the seats is still in service."""
    return bool(seats) and all(capacity[node] >= gpus for node, gpus in seats)
