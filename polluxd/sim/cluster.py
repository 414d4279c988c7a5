"""The simulated cluster and what happens to it besides scheduling."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from polluxd.errors import ConfigError
from polluxd.sim.move_costs import MoveCosts
from polluxd.sim.policy_knowledge import Knowledge


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """Nodes of one GPU type."""

    gpu_type: str
    nodes: int
    gpus_per_node: int
    speed: float = 1.0
    """Of local passes against the profiles; for types that have profiles of their own, against those."""

    @classmethod
    def parse(cls, text: str) -> NodeGroup:
        """`NAME:NODES:GPUS[:SPEED]`. Raises ConfigError."""
        name, *numbers = text.split(":")
        try:
            nodes, gpus = int(numbers[0]), int(numbers[1])
            speed = float(numbers[2]) if len(numbers) == 3 else 1.0
            sound = name.strip() != "" and len(numbers) <= 3 and min(nodes, gpus) >= 1 and 0 < speed < 1e3
        except (ValueError, IndexError):
            sound = False
        if not sound:
            raise ConfigError(
                f"--gpu-types {text}: expected NAME:NODES:GPUS_PER_NODE[:SPEED], such as a100:4:8 or t4:12:4:0.5"
            )
        return cls(name.strip(), nodes, gpus, speed)


@dataclass(frozen=True, slots=True)
class Cloud:
    """Nodes that the policy rents and gives back."""

    least: int
    most: int
    boot_seconds: float = 120.0
    price: float = 1.0
    """Of one node for an hour, from the order to the return."""
    patience: float = 300.0
    """Seconds between two changes of size."""
    low: float = 0.35
    high: float = 0.65
    """UTILITY thresholds (Pollux, section 4.2.2)."""


LENGTHS: Mapping[str, Callable[[np.random.Generator], float | None]] = {
    "true": lambda _draw: 1.0,
    # Off by a factor of 0.3 to 3, uniformly on a logarithmic scale.
    "wrong": lambda draw: float(0.3 * 10.0 ** draw.random()),
    # Half of the jobs declare nothing.
    "missing": lambda draw: None if draw.random() < 0.5 else 1.0,
    "none": lambda _draw: None,
    # A quarter of the jobs declare a tenth of their length, to be served first.
    "lies": lambda draw: 0.1 if draw.random() < 0.25 else 1.0,
    # Half of the trainings stop early, after 20 to 90 % of what was declared.
    "early": lambda draw: float(1.0 / draw.uniform(0.2, 0.9)) if draw.random() < 0.5 else 1.0,
}
"""Ways in which users declare the lengths of their trainings."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """The cluster, and how the world treats it. Times in seconds."""

    nodes: int = 16
    gpus_per_node: int = 4
    interval: float = 60.0
    """Between decisions; arrivals and freed GPUs wait for the next one, except for policies that react."""
    floor: float = 10.0
    """A policy that reacts decides no more often than this (the daemon's `cycle.floor_s`)."""
    poll: float = 5.0
    """How often such a policy looks (the daemon's `cycle.poll_s`)."""
    restart_seconds: float = 30.0
    restart_range: tuple[float, float] | None = None
    """Restart costs drawn per application, uniformly on a logarithmic scale, instead of the constant."""
    moves: MoveCosts | None = None
    """Restart costs by the path that the product takes, instead of either."""
    interference: float = 0.0
    """Slowdown of multi-node jobs that share a node."""
    jitter: float = 0.0
    """Log-error of what agents measure."""
    noise_jitter: float = 0.0
    """Log-error of the noise scales that they measure, beyond that."""
    lengths: str = "true"
    """What users declare of their trainings' lengths; see `LENGTHS`."""
    users: int = 1
    """Users who submit the jobs, in turn."""
    failures_per_day: float = 0.0
    """Node failures in the whole cluster."""
    repair_seconds: float = 1800.0
    power: float = -1.0
    pollux: Knowledge = field(default_factory=Knowledge)
    """What policy `pollux` knows and does."""
    seed: int = 0
    groups: tuple[NodeGroup, ...] = ()
    """GPU types; none: all nodes alike. They say how many nodes there are, and the largest is the usual size."""
    nodes_per_rack: int = 0
    """0: one switch for all."""
    rack_slowdown: float = 0.0
    """Synchronising over racks takes this share longer than over nodes of one."""
    cloud: Cloud | None = None
    """Autoscaling; `nodes` is then the most that there are."""

    def __post_init__(self) -> None:
        if self.groups:
            object.__setattr__(self, "nodes", sum(group.nodes for group in self.groups))
            object.__setattr__(self, "gpus_per_node", max(group.gpus_per_node for group in self.groups))
        if self.cloud is not None and not 1 <= self.cloud.least <= self.cloud.most == self.nodes:
            raise ConfigError(
                f"autoscaling from {self.cloud.least} to {self.cloud.most} nodes: expected 1 <= least <= most, "
                f"and the most to be the cluster's {self.nodes}"
            )

    @property
    def gpus(self) -> int:
        return sum(self.sizes) if self.groups else self.nodes * self.gpus_per_node

    @property
    def sizes(self) -> tuple[int, ...]:
        """GPUs of each node."""
        if not self.groups:
            return (self.gpus_per_node,) * self.nodes
        return tuple(group.gpus_per_node for group in self.groups for _ in range(group.nodes))

    @property
    def types(self) -> tuple[str, ...]:
        """GPU type of each node; empty names where all are alike."""
        if not self.groups:
            return ("",) * self.nodes
        return tuple(group.gpu_type for group in self.groups for _ in range(group.nodes))

    def rack(self, node: int) -> str:
        """The node's rack; empty where all hang on one switch."""
        return f"r{node // self.nodes_per_rack:04d}" if self.nodes_per_rack else ""

    def racks(self, nodes: Iterable[int]) -> int:
        """How many racks these nodes stand in."""
        return len({node // self.nodes_per_rack for node in nodes}) if self.nodes_per_rack else 1

    def restart_of(self, application: str) -> float:
        """What one restart of the application costs [s]."""
        if self.restart_range is None:
            return self.restart_seconds
        low, high = self.restart_range
        draw = np.random.default_rng([self.seed, zlib.crc32(application.encode())]).random()
        return float(low * (high / low) ** draw)

    def declared(self, job: str) -> float | None:
        """Return the declared length over the true one; None: not declared."""
        draw = np.random.default_rng([self.seed, 0xDEC1, zlib.crc32(job.encode())])
        return LENGTHS[self.lengths](draw)

    def outages(self, until: float) -> list[tuple[float, int]]:
        """Return (time, node) of each failure: a Poisson process."""
        found: list[tuple[float, int]] = []
        if self.failures_per_day <= 0:
            return found
        random = np.random.default_rng([self.seed, 0xFA11])
        time = 0.0
        while True:
            time += float(random.exponential(86400.0 / self.failures_per_day))
            if time > until:
                return found
            found.append((time, int(random.integers(self.nodes))))
