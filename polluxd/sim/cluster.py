"""The simulated cluster and what happens to it besides scheduling."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np


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
    interference: float = 0.0
    """Slowdown of multi-node jobs that share a node."""
    jitter: float = 0.0
    """Log-error of what agents measure."""
    failures_per_day: float = 0.0
    """Node failures in the whole cluster."""
    repair_seconds: float = 1800.0
    power: float = -1.0
    seed: int = 0

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    def restart_of(self, application: str) -> float:
        """What one restart of the application costs [s]."""
        if self.restart_range is None:
            return self.restart_seconds
        low, high = self.restart_range
        draw = np.random.default_rng([self.seed, zlib.crc32(application.encode())]).random()
        return float(low * (high / low) ** draw)

    def outages(self, until: float) -> list[tuple[float, int]]:
        """(time, node) of each failure up to a time: a Poisson process over the cluster."""
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
