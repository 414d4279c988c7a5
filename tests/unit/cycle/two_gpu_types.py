"""polluxd's cycle over a cluster of two GPU types in memory."""

from __future__ import annotations

from dataclasses import replace

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.cycle.controller import Controller
from polluxd.model import Node, Report
from polluxd.policy import Cache, decide
from tests import build
from tests.unit.apply.site import Site

THETA = ThroughputParams(0.05, 0.002, 0.005, 0.0005, 0.01, 0.001, 2.0)
QUICK = THETA._replace(alpha_grad=0.01, beta_grad=0.0004)
REPORT = Report(
    0, 0.0, BatchLimits(64, 64 * 256, 16, 512), THETA, NoiseScale(1.0, 30.0), explored_gpus=8, gpu_type="t4"
)
NODES = {
    n.name: n for n in (Node("n1", 4, "t4"), Node("n2", 4, "t4"), Node("n3", 4, "a100"), Node("head", 0))
}


class Cycle(Site):
    """polluxd's cycle over a cluster of two GPU types in memory."""

    def __init__(self, mode: str = "observe", users: tuple[str, ...] = (), **slurm: object) -> None:
        super().__init__(replace(n, cpus=64, partitions=frozenset({"main"})) for n in NODES.values())
        config = build.config(mode=mode, slurm=slurm, scope={"users": users})
        self.seen: list[tuple[object, object]] = []
        self.controller = Controller(
            config, self.slurm, self.store, self.acting, monotonic=self.slurm.clock, policy=self._decide
        )

    def _decide(self, snapshot, cache: Cache):
        plan = decide(snapshot, cache=cache)
        self.seen.append((snapshot, plan))
        return plan

    def step(self):
        # A move costs a job that came this instant everything it is worth.
        self.slurm.advance(61.0)
        self.controller.step()
        return self.seen[-1]
