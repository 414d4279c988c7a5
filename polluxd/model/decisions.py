"""A decision for the cluster, why each job got what it got, and the moves that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from polluxd.model.observations import NO_PLACEMENT, Placement

KEPT_BACK = "; rented nodes are kept back: "
"""Stands in the reason of each job that waits or leaves a node for the sake of money."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job got what it got, as data."""

    fair_nodes: int
    fair_gpus: int
    """The placement that its speedup is measured against."""
    weight: float
    limit: str
    """What keeps it from more: `contention`, `move-cost`, `goodput`, `exploration`, `progress`, `max-gpus`, `batch`,
    `counts`, `nodes`, `ceiling`, `fragmentation`, `stays`."""
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
    gpu_price: float | None = None
    """Seconds that a GPU takes off all jobs' completion times per second where it is worth the least; 0: GPUs are
    left. None: the objective has no price."""
    doubts: tuple[str, ...] = ()
    """Claims of its newest report that polluxd does not believe."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The decision for one job, with its reason."""

    job_id: int
    placement: Placement
    goodput: float
    """Predicted goodput there [examples/s]."""
    speedup: float
    """Predicted SPEEDUP against the job's fair share."""
    batch_size: int
    """Batch size that the prediction assumes."""
    changed: bool
    reason: str
    """One sentence a person can read."""
    explanation: Explanation | None = None
    """The same as data; None for a job that took no part in the decision."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One decision for the whole cluster."""

    allocations: tuple[Allocation, ...]
    objective: float
    upper_bound: float
    solver: str
    gpu_prices: Mapping[str, float] = field(default_factory=dict)
    """By GPU type, "" where types make no difference: seconds of all jobs' completion times that a GPU is worth per
    second, where it is worth the most. Empty: the objective has no price."""
    sooner: Mapping[int, float] = field(default_factory=dict)
    """By job: seconds by which the rented nodes bring its end nearer in each second. Jobs to which they make no
    difference are left out."""

    @property
    def gap(self) -> float:
        """Relative distance to the proven bound; 0 is optimal."""
        if self.upper_bound <= 0:
            return 0.0
        return max(0.0, 1.0 - self.objective / self.upper_bound)

    def of(self, job_id: int) -> Allocation | None:
        return next((a for a in self.allocations if a.job_id == job_id), None)

    def with_remarks(self, remarks: Mapping[int, str]) -> Plan:
        """Return the plan with a remark at the end of the reasons of some jobs, by job id."""
        if not remarks:
            return self
        remarked = (replace(a, reason=a.reason + remarks.get(a.job_id, "")) for a in self.allocations)
        return replace(self, allocations=tuple(remarked))


class DaemonMode(StrEnum):
    """How far polluxd goes: record the plan, show it too, or act on it."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ENFORCE = "enforce"


class Step(StrEnum):
    """Steps of a move, in order; each has its time in table `move`."""

    PLANNED = "planned"
    DRAINING = "draining"
    RECRUITING = "recruiting"
    """Growing in place: the agent is told to submit a companion job."""
    CHECKPOINTED = "checkpointed"
    REQUEUED = "requeued"
    CONFIGURED = "configured"
    STARTED = "started"
    TRAINING = "training"
    PARKED = "parked"
    """The end of path `park`: waiting without GPUs, kept back by a lease."""
    FAILED = "failed"

    @property
    def terminal(self) -> bool:
        return self in (Step.TRAINING, Step.PARKED, Step.FAILED)


RESTARTING_PATHS = frozenset({"requeue", "park"})
"""Those that end every process of a running job."""


_LAST_CHANCE = {
    "resize shrink": Step.DRAINING,
    "resize grow": Step.CONFIGURED,
    "start": Step.PLANNED,
}


@dataclass(frozen=True, slots=True)
class Move:
    """A move of one job, written before each action on Slurm.

    `attempt` is the restart count that the job had when the move was planned: with the job id it is the fence
    that keeps a move from being applied twice. `path` is `start` (first placement of a pending job), `requeue`
    (running job to another placement), `park` (running job to none) or `resize` (in place: the processes that stay
    live on). The nodes of a resize's target begin with the job's batch host, and are a subset of the source's (shrink)
    or a superset (grow).
    """

    id: int
    job_id: int
    attempt: int
    path: str
    source: Placement
    target: Placement
    reason: str
    step: Step
    times: Mapping[Step, float]
    """When each step was reached."""
    detail: str = ""
    cancelled_by: str = ""
    """Who took the move back (`polluxctl cancel-move`); obeyed until the job is requeued."""
    ends_at: float | None = None
    """When the attempt that drains uses up its user's time limit; None: unlimited, or no such attempt."""
    nonce: str = ""
    """Random text that only the job's own agent is told: a companion job proves by it that this move ordered it."""

    @property
    def in_allocation(self) -> bool:
        """The job is not requeued: its attempt goes on."""
        return self.path == "resize"

    @property
    def grows(self) -> bool:
        """In the allocation, by a companion job."""
        return self.in_allocation and len(self.target.nodes) > len(self.source.nodes)

    @property
    def gives_back(self) -> bool:
        """It leaves GPUs to others."""
        return self.target.gpus < self.source.gpus

    @property
    def added(self) -> Placement:
        """What a growing move's companion brings; none for other moves."""
        if not self.grows:
            return NO_PLACEMENT
        new = tuple(n for n in self.target.nodes if n not in self.source.nodes)
        return Placement(new, self.target.gpus_per_node)

    @property
    def revocable(self) -> bool:
        """Whether the move can still be taken back at its present step."""
        kind = f"resize {'grow' if self.grows else 'shrink'}" if self.in_allocation else self.path
        steps = list(Step)
        return steps.index(self.step) <= steps.index(_LAST_CHANCE.get(kind, Step.CHECKPOINTED))
