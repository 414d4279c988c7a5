"""A job of the fake Slurm, and how `scontrol show job` would print it."""

from __future__ import annotations

from dataclasses import dataclass, field

from polluxd.model import JobSpec, JobState
from polluxd.slurm.demands import Demands
from polluxd.slurm.protocol import Companion, SlurmJob


@dataclass(slots=True)
class FakeJob:
    """A job as the fake keeps it."""

    job_id: int
    name: str
    user: str
    spec: JobSpec | None
    submitted: float
    begin: float
    own_begin: float | None
    nodes_wanted: int
    gpus_per_node: int
    asked: tuple[int, int]
    runtime: float | None
    time_limit_s: float | None
    cpus_per_task: int = 1
    mem_per_node_mb: int | None = None
    state: JobState = JobState.PENDING
    raw_state: str = "PENDING"
    required: tuple[str, ...] = ()
    held: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    started: float | None = None
    ended: float | None = None
    on_hold: bool = False
    bad_constraints: bool = False
    """Slurm took its priority: no node could ever hold it."""
    refused: str = ""
    """Why Slurm has not started it although it may start."""
    depends_on: int | None = None
    left_at: float | None = None
    left_nodes: frozenset[str] = frozenset()
    becomes: JobState | None = None
    """What follows COMPLETING."""
    leaves_at: float = 0.0
    uid: int = 1000
    companion: Companion | None = None
    record: SlurmJob | None = field(default=None, init=False)
    """What `shown` made of the job since its last change."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
        if name != "record":
            object.__setattr__(self, "record", None)


def shown(job: FakeJob, *, waits: bool, now: float) -> SlurmJob:
    """The job's record at POSIX time `now`; `waits`: for another job."""
    pending = job.state is JobState.PENDING
    reason = _reason(job, waits, now) if pending else "None"
    if job.record is None or (job.record.reason, job.record.dependent) != (reason, pending and waits):
        job.record = _record(job, reason, waits)
    return job.record


def _record(job: FakeJob, reason: str, waits: bool) -> SlurmJob:
    pending = job.state is JobState.PENDING
    return SlurmJob(
        job_id=job.job_id,
        name=job.name,
        user=job.user,
        uid=job.uid,
        account="",
        partition="main",
        qos="normal",
        state=job.state,
        raw_state=job.raw_state,
        reason=reason,
        restart_count=job.restarts,
        submit_time=job.submitted,
        queued_at=job.submitted if job.left_at is None else job.left_at,
        start_time=job.started,
        eligible_time=job.begin,
        end_time=job.ended if job.state.finished else None,
        time_limit_s=job.time_limit_s,
        nodes=tuple(sorted(job.held)),
        gpus_per_node_held=dict(job.held),
        cpus_per_node_held=dict.fromkeys(job.held, job.cpus_per_task),
        requested_gpus_per_node=job.gpus_per_node,
        held_by_user=job.on_hold and (pending or job.state is JobState.RUNNING),
        dependent=pending and waits,
        begin_time=job.own_begin,
        admin_comment="pollux:v1" if job.spec is not None else "",
        spec=job.spec,
        batch_host=next(iter(job.held), ""),
        companion=job.companion,
        demands=Demands(asked=job.asked),
    )


def _reason(job: FakeJob, waits: bool, now: float) -> str:
    if job.on_hold:
        return "JobHeldUser"
    if job.bad_constraints:
        return "BadConstraints"
    if waits:
        return "Dependency"
    return "BeginTime" if now < job.begin else job.refused or "Resources"
