"""Jobs, and the picture of the cluster that a decision is made on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from polluxd.config.settings import PolicySettings
from polluxd.model.nodes import NO_PLACEMENT, Node, Placement
from polluxd.model.reports import Report


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
    search: str = ""
    """The search of the same user that the job is a trial of; empty: none."""


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
class Spent:
    """What rented nodes have cost in this month and today, both in UTC."""

    month: float = 0.0
    day: float = 0.0
    account_month: Mapping[str, float] = field(default_factory=dict)
    account_day: Mapping[str, float] = field(default_factory=dict)
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
