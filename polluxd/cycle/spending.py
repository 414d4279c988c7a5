"""Count what rented nodes cost, by the states in which Slurm shows them.

A node costs its price from the moment at which it is seen to boot until it is seen to be off. The jobs on it share the
cost by the GPUs that they hold there, whoever decided to rent it. What no job is on is nobody's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from polluxd.config.settings import PolicySettings
from polluxd.policy.cloud.renting import price_of
from polluxd.slurm.protocol import ClusterState, SlurmJob

LONGEST_GAP_S = 3600.0
"""polluxd counts the time for which it was away, for nodes that are on when it returns: up to an hour."""

_Share = tuple[str, str, str, int]
"""Type of the node, account, user, job."""


class Spending:
    """The costs since they were last written."""

    def __init__(self) -> None:
        self.at = 0.0
        """POSIX time of the last look; 0: none."""
        self._written_at = 0.0
        self._present: Mapping[_Share, tuple[float, float, float]] = {}
        """Nodes, GPUs and cost per second of each share at the last look."""
        self._counted: dict[_Share, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])

    def observe(self, state: ClusterState, settings: PolicySettings) -> None:
        """Count the time since the last look, with the nodes that were on then."""
        if self.at:
            self._count(max(state.taken_at - self.at, 0.0))
        self.at, self._present = state.taken_at, _rates(state, settings)

    def rows(self, counted_at: float | None) -> list[dict[str, Any]]:
        """Return what is to be added to the database, whose costs reach up to `counted_at`."""
        if counted_at is not None and self._written_at < counted_at - 1.0:
            # This process has just begun to count, or another one has counted in the meantime.
            self._counted.clear()
            gap = self.at - counted_at
            self._count(gap if 0.0 < gap <= LONGEST_GAP_S else 0.0)
        day = time.strftime("%Y-%m-%d", time.gmtime(self.at))
        names = ("type", "account", "user_name", "job_id")
        # A row without cost says that up to now there was none.
        found: dict[_Share, list[float]] = {("", "", "", 0): [0.0, 0.0, 0.0], **self._counted}
        return [
            {
                "day": day,
                **dict(zip(names, share, strict=True)),
                **dict(zip(("node_seconds", "gpu_seconds", "cost"), amounts, strict=True)),
            }
            for share, amounts in sorted(found.items())
        ]

    def written(self) -> None:
        """Begin again: the rows are in the database."""
        self._counted.clear()
        self._written_at = self.at

    def _count(self, seconds: float) -> None:
        for share, rates in self._present.items():
            for place, rate in enumerate(rates):
                self._counted[share][place] += rate * seconds


def _rates(state: ClusterState, settings: PolicySettings) -> dict[_Share, tuple[float, float, float]]:
    if not settings.cloud_prices:
        return {}
    on: dict[str, list[tuple[SlurmJob, int]]] = {}
    for job in state.jobs:
        if not job.state.finished:
            for name in {*job.nodes, *job.gpus_per_node_held}:
                on.setdefault(name, []).append((job, job.gpus_per_node_held.get(name, 0)))
    found: dict[_Share, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for node in state.nodes:
        kind, price = price_of(node, settings)
        if not kind or node.power == "off":
            continue
        jobs = on.get(node.name, [])
        gpus = sum(held for _, held in jobs)
        for job, held in jobs:
            part = held / gpus if gpus else 1.0 / len(jobs)
            _add(found[kind, job.account, job.user, job.job_id], part, held, price)
        if not jobs:
            _add(found[kind, "", "", 0], 1.0, 0, price)
    return {share: (nodes, gpus, cost) for share, (nodes, gpus, cost) in found.items()}


def _add(rates: list[float], part: float, gpus: int, price: float) -> None:
    for place, rate in enumerate((part, float(gpus), part * price / 3600.0)):
        rates[place] += rate
