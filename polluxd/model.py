"""What every room shares: observations and decisions, as frozen values.

Units: seconds, GPUs, examples. Times are POSIX timestamps (float, UTC). Nothing here does I/O or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pollux.parameters import BatchLimits, NoiseScale, ThroughputParams
from polluxd.explanation import Explanation
from polluxd.settings import PolicySettings


class DaemonMode(StrEnum):
    """How far polluxd goes: record the plan, show it too, or act on it."""

    OBSERVE = "observe"
    ADVISE = "advise"
    ENFORCE = "enforce"


class JobState(StrEnum):
    """The states of a Slurm job.

    Any base state that is not listed here is mapped onto one of these.
    """

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def finished(self) -> bool:
        return self in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


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


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What the user's `#POLLUX` lines ask for.

    Slurm carries them in AdminComment.
    """

    min_gpus: int = 1
    max_gpus: int | None = None
    adaptive: bool = True
    """False: batch size and learning rate stay the user's; only the GPUs change."""
    preemptible: bool = True
    """False: once started, its GPUs stay as they are until it ends."""
    cpus_per_gpu: int = 1
    mem_per_gpu_mb: int | None = None
    gpu_counts: str = "any"
    """GPU counts that the job can use: `any`, `powers-of-two`, `whole-nodes`, or a list such as `1,2,4,8`."""
    continues: bool = False
    """At its time limit the job goes back into the queue, until its training is finished."""


@dataclass(frozen=True, slots=True)
class Report:
    """The newest report of a job's agent.

    The boundary has validated it: every number is finite and in range.
    """

    attempt: int
    at: float
    limits: BatchLimits
    params: ThroughputParams | None = None
    """None until the first fit: the policy then uses an optimistic prior."""
    noise: NoiseScale | None = None
    """None until measured: efficiency is then taken as 1 at every batch size up to M0 only."""
    explored_gpus: int = 0
    """Most GPUs the job was ever measured on (0: never measured)."""
    explored_nodes: int = 0
    gpus: int = 0
    nodes: int = 0
    batch_size: int = 0
    """Total batch size M now in use."""
    goodput: float = 0.0
    """Measured throughput x efficiency now [examples/s of M0-equivalent progress]."""
    throughput: float = 0.0
    progress: float = 0.0
    """Scale-invariant steps done."""
    target: float | None = None
    """Scale-invariant steps declared (statistical epochs x |D| / M0), when known."""
    epoch: float = 0.0
    lr_factor: float = 1.0
    checkpointed: bool = False
    """A complete checkpoint of this job exists."""
    first_step_at: float | None = None
    """When this attempt made its first optimizer step; None until then."""
    restart_cost: float | None = None
    """Measured by the agent: last step before to first step after the newest move [s]."""
    params_by_type: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fits by GPU type, where known; `params` holds for every type not named here."""
    gpu_type: str = ""
    """The GPU type that `params` was measured on, as Slurm names it where its nodes are typed; empty: not known."""
    prior_gpus: int = 0
    """Most GPUs that `params` knows from earlier runs of the same training; 0: nothing in it is theirs (any more)."""
    prior_nodes: int = 0
    assumed_types: frozenset[str] = frozenset()
    """Of `params_by_type`, the types on which this training was never measured: taken from another one's fit."""
    data_wait: float | None = None
    """Share of the training time spent waiting for the data loader."""
    resize: str = "requeue"
    """The fastest way in which the job's size can be changed: `in-place` or `requeue`."""
    resized: int = 0
    """The newest resize in effect, by the id of its `Move`; 0: none in this attempt."""
    refused: int = 0
    """A resize that the agent could not carry out, by its id; 0: none."""
    refused_why: str = ""
    resize_cost: float | None = None
    """Seconds between the optimizer steps before and after the newest resize."""
    most_gpus: int | None = None
    """Most GPUs for the job until polluxd sees progress where it is; None: no such limit. polluxd's own."""


@dataclass(frozen=True, slots=True)
class SnapshotJob:
    """A job that opted in, as the policy sees it."""

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    spec: JobSpec
    submitted_at: float
    age: float
    """Seconds since submission."""
    placement: Placement = NO_PLACEMENT
    """What it holds now, or will hold when the move in flight ends."""
    report: Report | None = None
    weight: float = 1.0
    pinned: bool = False
    """Must keep its placement in this plan (move in flight, cooldown, not preemptible, `pin`)."""
    pin_reason: str = ""
    started: bool = False
    """Has run before: its next placement is a move, not a first start."""
    waiting: float | None = None
    """Seconds since it last held GPUs; None: since submission, where it holds none now."""
    time_limit: float | None = None
    """Seconds after which Slurm ends it for good; None: it has no limit, or goes on after it."""
    attempt: int = 0
    """Slurm's restart count."""
    qos: str = ""
    moves: int = 0
    lost_seconds: float = 0.0
    """C_j: seconds lost to moves so far."""
    move_cost: float = 30.0
    """delta_j: what one more move is expected to cost [s]; the paper's constant until measured."""
    resize_cost: float | None = None
    """What it is expected to cost to add or give up nodes in place [s]; None: the job cannot be resized in place."""
    keeps: tuple[str, ...] = ()
    """Its nodes in the order in which a shrink is to leave them to it, so that it need not be requeued; none where it
    cannot shrink within its allocation."""
    doubts: tuple[str, ...] = ()
    """Claims of its newest report that polluxd does not believe; `report` is without them."""
    doubted_reports: int = 0
    """Its reports with such claims, since polluxd started."""
    max_gpus_rule: str = ""
    """Slurm's rule that `spec.max_gpus` stands for, in words; empty: the user's own."""
    contiguous: bool = False
    """Its nodes follow each other in Slurm's order (--contiguous)."""


@dataclass(frozen=True, slots=True)
class GpuLimit:
    """The most GPUs that some jobs may hold together, by a rule of Slurm."""

    rule: str
    """In words, such as `gres/gpu=6 of account lab`."""
    jobs: tuple[int, ...]
    """Job ids."""
    gpus: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision may depend on."""

    cluster: str
    taken_at: float
    nodes: tuple[Node, ...]
    jobs: tuple[SnapshotJob, ...]
    settings: PolicySettings = field(default_factory=PolicySettings)
    limits: tuple[GpuLimit, ...] = ()


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

    @property
    def gap(self) -> float:
        """Relative distance to the proven bound; 0 is optimal."""
        if self.upper_bound <= 0:
            return 0.0
        return max(0.0, 1.0 - self.objective / self.upper_bound)

    def of(self, job_id: int) -> Allocation | None:
        return next((a for a in self.allocations if a.job_id == job_id), None)


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
    or a superset (grow). A database may hold finished moves of the path `relaunch`, which polluxd no longer takes.
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
