"""The simulated cluster, what happens to it besides scheduling, and the settings of polluxd there.

A scenario file (`scenario_file`) has the fields of `Scenario` as its keys, and a table for each field that has fields
of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from polluxd.config.settings import PolicySettings
from polluxd.config.value_types import Duration, Seconds, Share
from polluxd.sim.generator import Trace
from polluxd.sim.move_costs import MoveCosts

CHECKED = ConfigDict(extra="forbid", use_attribute_docstrings=True)
Factor = Annotated[float, Field(gt=0, lt=1000)]


@dataclass(frozen=True, slots=True, config=CHECKED)
class Knowledge:
    """What polluxd knows beside the jobs' reports. Its policy has a table of its own."""

    remembers: bool = True
    """The fits that earlier runs of the same application left are known from a job's first start on."""
    gpu_speeds: bool = True
    """One speed per GPU type is configured (the daemon's `slurm.gpu_speeds`), for jobs not measured there yet."""


@dataclass(frozen=True, slots=True, config=CHECKED)
class NodeGroup:
    """Nodes of one GPU type."""

    gpu_type: Annotated[str, Field(min_length=1)]
    """Step times are those of the folder of this name in an application's profile if it exists; the shipped
    applications know t4, v100 and a100."""
    nodes: PositiveInt
    """How many there are."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64)]
    """GPUs of each node."""
    speed: Factor = 1.0
    """Of local passes against the profiles; for types that have profiles of their own, against those."""


@dataclass(frozen=True, slots=True, config=CHECKED)
class Cloud:
    """Nodes that are rented: off until a job is placed there. polluxd rents none while `cloud_hour_value` in `[policy]`
    is 0."""

    least: Annotated[int, Field(ge=0)]
    """Nodes that are always on."""
    most: PositiveInt
    """All nodes. Policies other than `pollux` and `pollux-paper` have them on all the time."""
    boot_seconds: Duration = 120.0
    """From the order of a node to its use."""
    price: Duration = 1.0
    """Of one node for an hour, from the order to the return."""
    idle_seconds: Duration = 300.0
    """A node is off again when no job was there for so long (Slurm's `SuspendTime`). Policy `pollux-paper` changes the
    number of nodes no more often."""

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) must not be above most ({self.most})")


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


@dataclass(frozen=True, slots=True, config=CHECKED)
class Scenario:
    """The cluster, and how the world treats it. Times in seconds."""

    nodes: Annotated[int, Field(ge=1, le=100_000)] = 16
    """With `groups` or `cloud`, these say how many nodes there are."""
    gpus_per_node: Annotated[int, Field(ge=1, le=64)] = 4
    """GPUs of each node."""
    interval: Annotated[Seconds, Field(ge=1)] = 60.0
    """Between decisions; arrivals and freed GPUs wait for the next one, except for policies that react."""
    floor: Seconds = 10.0
    """polluxd, and policies that react as it does, decide no more often than this (the daemon's `cycle.floor_s`), or
    every `interval`."""
    poll: Seconds = 5.0
    """How often such a policy looks (the daemon's `cycle.poll_s`), at most every `interval`."""
    restart_seconds: Duration = 30.0
    """What a move costs a job."""
    restarts: Mapping[str, Duration] = field(default_factory=dict, hash=False)
    """Restart cost by application, instead of `restart_seconds` where it is given."""
    step_factors: Mapping[str, Factor] = field(default_factory=dict, hash=False)
    """Factor on the step times of an application's profile, to calibrate it."""
    moves: MoveCosts | None = None
    """Restart costs by the path that the product takes, instead of all these."""
    jitter: Share = 0.0
    """Log-error of what agents measure."""
    noise_jitter: Share = 0.0
    """Log-error of the noise scales that they measure, beyond that."""
    lengths: Literal["true", "wrong", "missing", "none", "lies", "early"] = "true"
    """How users declare the lengths of their trainings: `wrong` by a factor of 0.3 to 3; `missing` for half of the
    jobs; `lies`: a quarter declare a tenth; `early`: half of the trainings stop early."""
    users: PositiveInt = 1
    """Users who submit the jobs, in turn."""
    failures_per_day: Duration = 0.0
    """Node failures in the whole cluster."""
    repair_seconds: Duration = 1800.0
    """Until a failed node is back."""
    trace: Trace = Field(default_factory=Trace)
    pollux: Knowledge = Field(default_factory=Knowledge)
    policy: PolicySettings = field(default_factory=PolicySettings, hash=False)
    """Settings of polluxd's policy, as in `[policy]` of `polluxd.toml`. `power` holds for `pollux-paper`, too."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of all random numbers: the same seed gives the same result."""
    groups: tuple[NodeGroup, ...] = ()
    """GPU types; none: all nodes alike. The largest of their nodes is the usual size."""
    nodes_per_rack: Annotated[int, Field(ge=0)] = 0
    """Nodes on one switch; 0: one switch for all."""
    rack_slowdown: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Synchronising over racks takes this share longer than over nodes of one."""
    cloud: Cloud | None = None

    def __post_init__(self) -> None:
        if self.policy.paused:
            raise ValueError("policy.paused: no job would ever start")
        if self.policy.cloud_prices:
            raise ValueError("policy.cloud_prices: expected the price of a rented node as cloud.price")
        for conflict in self.policy.conflicts():
            raise ValueError(f"policy.{conflict}")
        derived: dict[str, float] = {
            "floor": min(self.floor, self.interval),
            "poll": min(self.poll, self.interval),
        }
        if self.groups:
            derived["nodes"] = sum(group.nodes for group in self.groups)
            derived["gpus_per_node"] = max(group.gpus_per_node for group in self.groups)
        if self.cloud is not None:
            most = derived.setdefault("nodes", self.cloud.most)
            if most != self.cloud.most:
                raise ValueError(
                    f"cloud.most is {self.cloud.most}: expected {most}, as many as groups have nodes"
                )
        for name, value in derived.items():
            object.__setattr__(self, name, value)

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
        return self.restarts.get(application, self.restart_seconds)

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
