"""Nodes, jobs and their agents' reports: what a decision is made on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

from pollux.parameters import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.settings import PolicySettings

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
    cpus_per_core: int = 1
    """Slurm gives whole cores: a job that asks for one CPU of a core gets all of them."""

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
    params_by_type: Mapping[str, ThroughputParams] = field(default_factory=dict)
    """Fits by GPU type, where known; `params` holds for every type not named here."""
    gpu_type: str = ""
    """The GPU type that `params` was measured on, as Slurm names it where its nodes are typed; empty: not known."""
    prior_gpus: int = 0
    """Most GPUs measured by earlier runs that `params` still relies on; 0 if none."""
    prior_nodes: int = 0
    local_max_by_type: Mapping[str, int] = field(default_factory=dict)
    """Most examples per pass on other GPU types; "": on those not named. Empty: as on this one."""
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
    immovable: str = ""
    """Why the job can follow no order to move now, as its agent says; empty: it can."""
    barred: str = ""
    """Why its batch limits or `least_gpus` leave sizes out at which its trainer did not start; empty: they do not."""
    least_gpus: int = 1
    """Fewest GPUs on which its trainer starts, of those on which it has trained."""
    resize_cost: float | None = None
    """Seconds between the optimizer steps before and after the newest resize."""
    next_save_s: float | None = None
    """Seconds from the report to the trainer's own next checkpoint; None: it saves when it is asked."""
    search_rank: float | None = None
    """A trial's claimed rank in its search, from 0 to 1 (the best)."""
    most_gpus: int | None = None
    """Most GPUs for the job until polluxd sees progress where it is; None: no such limit. polluxd's own."""

    def limits_on(self, gpu_type: str) -> BatchLimits:
        """The batch limits on a GPU type, which its memory bounds; on an unknown one, those of this type."""
        if not self.local_max_by_type or gpu_type in ("", self.gpu_type):
            return self.limits
        most = self.local_max_by_type.get(gpu_type, self.local_max_by_type.get("", self.limits.local_max))
        return replace(self.limits, local_max=max(most, self.limits.local_min))

    def for_decision(self, gpu_types: Collection[str]) -> Report:
        """The report as a decision goes by it, and its snapshot keeps it.

        Without what only people and moves read, and without GPU types that the cluster does not have.
        """
        known = {"", *gpu_types}
        return replace(
            self,
            params_by_type={kind: fit for kind, fit in self.params_by_type.items() if kind in known},
            local_max_by_type={kind: most for kind, most in self.local_max_by_type.items() if kind in known},
            **_UNDECIDED,
        )


_UNDECIDED: Mapping[str, Any] = {
    **{
        "at": 0.0,
        "nodes": 0,
        "batch_size": 0,
        "goodput": 0.0,
        "throughput": 0.0,
        "epoch": 0.0,
        "lr_factor": 1.0,
    },
    **{"checkpointed": False, "data_wait": None},
    **{"resized": 0, "refused": 0, "refused_why": "", "resize_cost": None, "next_save_s": None},
}
"""Fields of a report that no decision depends on, with their defaults."""


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
        return self in _FINISHED


_FINISHED = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})


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
    """GPU counts that the job can use: `any`, `powers-of-two`, `whole-nodes`, `multiples-of-8`, or a list such as
    `1,2,4,8`."""
    continues: bool = False
    """At its time limit the job goes back into the queue, until its training is finished."""
    search: str = ""
    """The search of the same user that the job is a trial of; empty: none."""
    own_size: int | None = None
    """GPUs that its user asked for, on which it starts: its script calls `pollux wrap`, or no `pollux` at all, and
    nobody else knows a size at which its trainer works. None: polluxd chooses."""
    one_thread: bool = False
    """Each of its CPUs is a core, whose other threads stay idle (--threads-per-core=1, --hint=nomultithread)."""


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
    unconfirmed: tuple[str, ...] = ()
    """What polluxd does not count on until the job's progress confirms it."""
    max_gpus_rule: str = ""
    """Slurm's rule that `spec.max_gpus` stands for, in words; empty: the user's own."""
    contiguous: bool = False
    """Its nodes follow each other in Slurm's order (--contiguous)."""
    max_nodes: int | None = None
    """Most nodes on which its script was seen to run; None: no such bound."""
    gives_back: bool = False
    """It may not keep more than `spec.max_gpus`, though it holds more."""


@dataclass(frozen=True, slots=True)
class GpuLimit:
    """The most GPUs that some jobs may hold together, by a rule of Slurm."""

    rule: str
    """In words, such as `gres/gpu=6 of account lab`."""
    jobs: tuple[int, ...]
    """Job ids."""
    gpus: int


@dataclass(frozen=True, slots=True)
class Spent:
    """What rented nodes have cost in this month, in UTC."""

    month: Mapping[str, float] = field(default_factory=dict)
    """By account."""
    counted_at: float = 0.0
    """POSIX time up to which it was counted."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a decision may depend on."""

    cluster: str
    taken_at: float
    nodes: tuple[Node, ...]
    jobs: tuple[SnapshotJob, ...]
    settings: PolicySettings = field(default_factory=PolicySettings)
    limits: tuple[GpuLimit, ...] = ()
    spent: Spent | None = None
    """None: no node was ever rented."""
