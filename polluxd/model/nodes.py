"""Nodes, and GPUs on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Power = Literal["on", "booting", "off"]
"""Whether Slurm keeps a node powered (power saving, cloud nodes). Slurm boots a node that is off for a job that is
placed there."""


@dataclass(frozen=True, slots=True)
class Node:
    """A compute node as the policy sees it."""

    name: str
    gpus: int
    gpu_type: str = ""
    foreign_gpus: int = 0
    """GPUs held by jobs that are not ours."""
    schedulable: bool = True
    """False while drained, down, failing, in maintenance or rebooting."""
    partitions: frozenset[str] = frozenset()
    cpus: int = 0
    foreign_cpus: int = 0
    rack: str = ""
    """The leaf switch (or rack) that the node hangs on; empty: not known, which counts as one more rack."""
    features: frozenset[str] = frozenset()
    """Features that are active; a snapshot leaves them out."""
    tmp_mb: int | None = None
    """Local disk; None: not known. A snapshot leaves it out."""
    position: int = 0
    """Place among all nodes in Slurm's order: what --contiguous goes by."""
    memory_mb: int = 0
    """Memory that Slurm gives to jobs here; 0: it sets no limit, or is not known."""
    foreign_memory_mb: int = 0
    power: Power = "on"
    boot_s: float | None = None
    """Of a node that is off: seconds that boots of such nodes took; None: none was seen."""
    booted_at: float | None = None
    """Of a node that was seen to boot: POSIX time at which it began to; it has been on since then."""

    @property
    def capacity(self) -> int:
        """GPUs that Pollux jobs may hold here."""
        return max(self.gpus - self.foreign_gpus, 0) if self.schedulable else 0


@dataclass(frozen=True, slots=True)
class Placement:
    """GPUs of one job, the same number on each of its nodes.

    No nodes means no GPUs.
    """

    nodes: tuple[str, ...] = ()
    gpus_per_node: int = 0

    def __post_init__(self) -> None:
        if bool(self.nodes) != (self.gpus_per_node > 0):
            raise ValueError(
                f"a placement has nodes and GPUs, or neither: {self.nodes!r} x {self.gpus_per_node}"
            )
        if len(set(self.nodes)) != len(self.nodes):
            raise ValueError(f"a placement names a node twice: {self.nodes!r}")

    @property
    def gpus(self) -> int:
        return len(self.nodes) * self.gpus_per_node

    def __bool__(self) -> bool:
        return bool(self.nodes)

    def __str__(self) -> str:
        return ",".join(f"{n}:{self.gpus_per_node}" for n in self.nodes) or "none"


NO_PLACEMENT = Placement()
