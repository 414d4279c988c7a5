"""What people and dashboards read out of the database, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from polluxd.config.settings import PolicySettings
from polluxd.model import Allocation, JobSpec, Move, Report, Spent


@dataclass(frozen=True, slots=True)
class MoveTotals:
    """What moves have cost one job so far."""

    count: int
    """R_j: completed moves; a first start is none."""
    lost_seconds: float
    """C_j."""
    mean_cost: Mapping[str, float]
    """Seconds per move, by path: `resize`, or `requeue` for all others; paths
    that were never taken are left out."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """POSIX times of one job that Slurm forgets when it requeues it."""

    submitted_at: float
    """First submission."""
    started_at: float | None = None
    """First start."""
    held_at: float | None = None
    """When it was last seen to hold GPUs; None: never."""
    most_gpus: int = 0
    """Most GPUs that it has held."""
    most_nodes: int = 0


MoveCost = TypedDict(
    "MoveCost",
    {
        "id": int,
        "job_id": int,
        "path": str,
        "from": str,
        "to": str,
        "planned_at": float,
        "total_s": float,
        "drained_s": float,
        "measured": bool,
        "steps": dict[str, float],
    },
)
"""The cost of one completed move: `total_s` without a training step, split into `steps`, which add up to it.
`from` and `to` are placements as text ("n1:4,n2:4" or "none"); `drained_s` runs from the order to stop to the
last step before (training goes on in it); `measured`: both ends come from the agent's own stamps."""


@dataclass(frozen=True, slots=True)
class JobView:
    """One row of `polluxctl jobs`.

    Times are POSIX seconds. None: not known (yet).
    """

    job_id: int
    name: str
    user: str
    account: str
    partition: str
    state: str
    slurm_reason: str
    attempt: int
    spec: JobSpec
    nodes: tuple[str, ...]
    gpus: int
    submitted_at: float
    started_at: float | None
    ended_at: float | None
    reported_at: float | None
    batch_size: int | None
    goodput: float | None
    throughput: float | None
    progress: float | None
    target: float | None
    epoch: float | None
    checkpointed: bool
    speedup: float | None
    """As predicted by the latest decision."""
    decision_reason: str | None
    cycle_id: int | None
    moves: int
    move_step: str | None
    """Step of the newest move; one that is not terminal is under way."""
    move_reason: str | None
    move_detail: str | None
    mode: str | None = None
    """What the job's agent may change (observe, advise, enforce); None: not told."""
    advice: Mapping[str, float] | None = None
    """In mode advise, the better batch size: `batch_size`, `local_batch`, `accumulation`, `goodput_ratio`."""
    uid: int | None = None
    silent_since: float | None = None
    """Since when it holds GPUs without a training step reported in this attempt; None: it does not."""
    left_alone: str = ""
    """Why polluxd leaves the job to Slurm; empty: it does not."""

    @property
    def fraction_done(self) -> float | None:
        """progress / target, in 0..1, where a target was declared."""
        if self.progress is None or not self.target:
            return None
        return min(self.progress / self.target, 1.0)


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that ran and has ended. Times are POSIX seconds."""

    job_id: int
    user: str
    name: str
    account: str
    partition: str
    spec: JobSpec
    submitted_at: float
    started_at: float
    ended_at: float
    report: Report | None
    """Its last one; None: there is none that can be read."""

    @property
    def seconds(self) -> float:
        return max(self.ended_at - self.started_at, 1.0)


@dataclass(frozen=True, slots=True)
class CycleView:
    """One cycle as recorded."""

    id: int
    epoch: int | None
    mode: str
    started_at: float
    note: str
    objective: float | None
    upper_bound: float | None
    gap: float | None
    solver: str | None
    """None: nothing was decided in this cycle; `note` says why."""
    durations: Mapping[str, float]
    plan_digest: str | None = None
    """Digest of all decisions; None: recorded before digests were."""


@dataclass(frozen=True, slots=True)
class CycleSummary:
    """One line of `polluxctl decisions list`."""

    cycle: CycleView
    jobs: int
    """Jobs that it decided on."""
    changed: int
    """Those of them that were to start, move or stop."""
    kept: bool
    """Its snapshot is kept: it can be replayed."""


@dataclass(frozen=True, slots=True)
class JobExplanation:
    """All that `polluxctl explain JOB` tells."""

    job: JobView
    report: Report | None
    allocation: Allocation | None
    """The newest decision on the job, with the cycle that made it."""
    cycle: CycleView | None
    rejected: str = ""
    """Why its latest report is not usable; empty where it is, or where there is none."""


@dataclass(frozen=True, slots=True)
class CycleRecords:
    """What the database held at one moment: all that a cycle reads.

    The last four are read for a decision alone.
    """

    settings: PolicySettings = field(default_factory=PolicySettings)
    reports: Mapping[int, Report] = field(default_factory=dict)
    """The latest usable report of each job that has not ended. Where earlier runs of the same training left fits for
    other GPU types, the report has them too."""
    rejected: Mapping[int, str] = field(default_factory=dict)
    """Why the latest report of a job is unusable."""
    moves: Sequence[Move] = ()
    """Moves under way, oldest first. A restarted polluxd must finish or abandon each of them."""
    rent: Spent | None = None
    """What rented nodes have cost this month; None: nothing was counted, or no node has a price."""
    times: Mapping[int, JobTimes] = field(default_factory=dict)
    """What Slurm does not keep over a requeue, for jobs that have not ended."""
    totals: Mapping[int, MoveTotals] = field(default_factory=dict)
    """Completed moves of jobs that have not ended; absent without one."""
    pins: Mapping[int, str] = field(default_factory=dict)
    """Why jobs stay as they are: who pinned them, or their agent."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Restarts of running jobs within the last hour, and planned ones, by user; '' for jobs that polluxd has forgotten.
    A resize in place does not count: it ends no process except on the nodes that the job gives back."""


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """One report of the past."""

    job_id: int
    attempt: int
    at: float
    gpus: int
    nodes: int
    batch_size: int
    local_batch: int
    accumulation: int
    goodput: float
    throughput: float
    progress: float
    target: float | None
    epoch: float
    lr_factor: float
    noise_scale: float | None
    """phi [examples]."""
    optimizer_steps: int


@dataclass(frozen=True, slots=True)
class SettingChange:
    """One line of the settings' audit."""

    at: float
    who: str
    name: str
    from_value: Any
    to_value: Any


TROUBLES = {
    "slurm_error": "Slurm does not answer, or not as expected",
    "database_error": "the database refuses what polluxd writes, or does not answer",
    "refused": "what polluxd needs is not as expected",
    "fault": "a mistake in polluxd itself",
}
"""Of the results of a turn, those in which a leader takes no action, in words."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, for `polluxctl`."""

    epoch: int
    holder: str
    since: float
    leased: bool
    """False: it has stopped, or stalled for longer than its lease."""
    trouble: str = ""
    """Why it takes no action: one of `TROUBLES`; empty where it does."""
