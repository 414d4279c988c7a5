"""Show the daemon's rule for rented nodes a simulated cloud."""

from __future__ import annotations

from dataclasses import replace

from polluxd.config.settings import PolicySettings
from polluxd.model import Node, Snapshot, SnapshotJob, Spent
from polluxd.policy.cloud.powered_down import rented
from polluxd.policy.listing import Cache
from polluxd.sim.engine import View
from polluxd.sim.simulated_job import node_name

RENTED = "rented"
"""The feature that has the price. The cloud's `least` nodes are the cluster's own."""


class Renting:
    """The rule, and what was spent today."""

    def __init__(self) -> None:
        self._cache = Cache()
        self._day, self._at, self._nodes, self._spent = -1, 0.0, 0, 0.0

    def nodes_wanted(self, view: View, jobs: tuple[SnapshotJob, ...], settings: PolicySettings) -> int:
        """Return how many nodes to have."""
        cloud = view.scenario.cloud
        assert cloud is not None
        present = [i for i in range(cloud.least, cloud.most) if i not in view.absent]
        self._count(view.now, len(present), cloud.price)
        priced = replace(
            settings,
            cloud_prices={RENTED: cloud.price},
            cloud_hour_value=cloud.hour_value,
            cloud_day_budget=cloud.day_budget,
            # A change of size comes this late at most; then the nodes end at once.
            cloud_return_s=cloud.patience + view.scenario.interval,
        )
        snapshot = Snapshot("simulated", view.now, _nodes(view), jobs, priced, spent=Spent(day=self._spent))
        found = rented(snapshot, self._cache).nodes
        # A node that boots has no room yet, and stays.
        boots = sum(not view.capacity[i] for i in present)
        return cloud.least + boots + len(found)

    def _count(self, now: float, nodes: int, price: float) -> None:
        """Add the cost since the last look; a day ends at midnight of the simulation."""
        day = int(now // 86400.0)
        if day != self._day:
            self._spent = 0.0
        since = max(self._at, day * 86400.0)
        self._spent += price * max(self._nodes, nodes) * max(now - since, 0.0) / 3600.0 * (self._day >= 0)
        self._day, self._at, self._nodes = day, now, nodes


def _nodes(view: View) -> tuple[Node, ...]:
    cloud, scenario = view.scenario.cloud, view.scenario
    assert cloud is not None
    listed = zip(view.capacity, scenario.sizes, scenario.types, strict=True)
    return tuple(
        Node(
            node_name(i),
            size,
            kind,
            schedulable=room > 0 or i in view.absent,
            rack=scenario.rack(i),
            features=frozenset({RENTED}) if i >= cloud.least else frozenset(),
            power="off" if i in view.absent else "on",
            boot_s=cloud.boot_seconds,
        )
        for i, (room, size, kind) in enumerate(listed)
    )
