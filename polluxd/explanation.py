"""Why a job got what it got."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job got what it got, as data."""

    fair_nodes: int
    fair_gpus: int
    """The placement that its speedup is measured against."""
    weight: float
    limit: str
    """What keeps it from more: `contention`, `move-cost`, `goodput`, `exploration`, `progress`, `max-gpus`, `batch`,
    `counts`, `nodes`, `ceiling`, `fragmentation`, `pinned`."""
    next_gpus: int | None = None
    """The next larger placement that would raise its goodput, where there is one."""
    next_goodput: float = 0.0
    """Its goodput there [examples/s]."""
    marginal: float = 0.0
    """Utility per GPU that the next placement would bring it."""
    price: float = 0.0
    """Utility per GPU of the last one given to anybody: `marginal` is below it where contention is the limit."""
    taken_by: int | None = None
    """The job whose last GPUs are worth the least, yet more to it than they would be here."""
    move_factor: float = 1.0
    """What a move would multiply its speedup by in this plan."""
    move_seconds: float = 0.0
    """What a move is expected to cost it."""
    racks: int = 0
    """Racks that its nodes lie in, where it has several nodes and racks are known; else 0."""
    one_rack: float = 0.0
    """Its goodput on as many nodes of one rack [examples/s], where it spans several and was measured so; else 0."""
    gpu_price: float | None = None
    """Seconds that a GPU takes off all jobs' completion times per second where it is worth the least; 0: GPUs are
    left. None: the objective has no price."""
    seconds_left: float | None = None
    """Seconds until the job is predicted to end, its wait for GPUs included. None: it declared no length, it never ran,
    or too few jobs say when they will leave it GPUs."""
    doubts: tuple[str, ...] = ()
    """Claims of its newest report that polluxd does not believe."""
    doubted_reports: int = 0
    """Its reports with such claims, since polluxd started."""
