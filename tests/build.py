"""Nodes, jobs, reports, moves, plans and snapshots for tests: every field has a plain value unless a test gives it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.config.config_file import Config, parse_config
from polluxd.config.settings import PolicySettings
from polluxd.model import (
    NO_PLACEMENT,
    Allocation,
    JobSpec,
    JobState,
    Move,
    Node,
    Placement,
    Plan,
    Report,
    Snapshot,
    SnapshotJob,
    Step,
)
from polluxd.slurm.protocol import SlurmJob

THETAS = {
    "scalable": ThroughputParams(0.05, 0.002, 0.005, 0.0005, 0.01, 0.001, 2.0),
    "middling": ThroughputParams(0.05, 0.001, 0.02, 0.003, 0.08, 0.005, 1.6),
    "stubborn": ThroughputParams(0.05, 0.0005, 0.2, 0.05, 0.9, 0.1, 1.0),
}
NOISE = NoiseScale(1.0, 30.0)


def config(mode: str = "observe", **sections: Any) -> Config:
    """The sections of polluxd.toml that a test gives, and the two keys that must be given."""
    slurm = {"cluster": "c", **sections.pop("slurm", {})}
    database = {"url": "postgresql://pollux_daemon@127.0.0.1:1/pollux", **sections.pop("database", {})}
    return parse_config({"mode": mode, "slurm": slurm, "database": database, **sections}, "test")


def node(name: str, gpus: int = 4, **more: Any) -> Node:
    return Node(name, gpus, **{"partitions": frozenset({"main"}), **more})


def nodes(count: int, gpus: int = 4) -> tuple[Node, ...]:
    return tuple(node(f"n{i:03d}", gpus) for i in range(count))


def slurm_job(
    job_id: int = 7, state: JobState = JobState.RUNNING, at: Placement = NO_PLACEMENT, **more: Any
) -> SlurmJob:
    """A job that opted in, as Slurm shows it; it holds `at`."""
    known = {
        **dict(name=f"job{job_id}", user="ann", uid=1000, account="lab", partition="main", qos="normal"),
        **dict(raw_state=state.value, reason="None", restart_count=0, submit_time=0.0, spec=JobSpec()),
        "gpus_per_node_held": dict.fromkeys(at.nodes, at.gpus_per_node),
    }
    return SlurmJob(job_id, state=state, **{**known, **more})


def report(
    kind: str | ThroughputParams | None = "scalable",
    explored: int = 64,
    noise: NoiseScale | None = NOISE,
    **more: Any,
) -> Report:
    limits = more.pop("limits", BatchLimits(64, 64 * 256, 16, 512))
    theta = THETAS[kind] if isinstance(kind, str) else kind
    return Report(0, 0.0, limits, theta, noise, explored_gpus=explored, **more)


def report_row(**changes: Any) -> dict[str, Any]:
    """The row of a report of job 7, as the database returns it; what is no column changes the document."""
    theta = ("alpha_grad", "beta_grad", "alpha_local", "beta_local", "alpha_node", "beta_node")
    row = {"id": 1, "job_id": 7, "attempt": 0, "received_at": datetime.fromtimestamp(1e9, UTC)}
    columns = {
        name: changes.pop(name) for name in (*row, "known_gpus", "known_nodes", "drained") if name in changes
    }
    document = {
        **{"params": {**dict.fromkeys(theta, 0.5), "gamma": 2.0}, "noise": {"sqr": 1.0, "var": 3.0}},
        "limits": {"initial": 32, "maximum": 64, "local_min": 1, "local_max": 32},
        **{"prior_gpus": 2, "prior_nodes": 2, "times": {}},
        **{"explored_gpus": 2, "explored_nodes": 1, "gpus": 2, "nodes": 1, "batch_size": 64},
        **{"goodput": 1.0, "throughput": 11.0, "progress": 5.0, "epoch": 0.5},
        **{"lr_factor": 1.0, "checkpointed": False},
        **changes,
    }
    return {**row, **columns, "report": document}


def move(
    path: str = "requeue",
    source: Placement = NO_PLACEMENT,
    target: Placement = NO_PLACEMENT,
    step: Step = Step.PLANNED,
    times: Mapping[Step, float] | None = None,
    **more: Any,
) -> Move:
    """A move of job 7; without `times`, its step was reached at 0."""
    known = {
        "id": 1,
        "job_id": 7,
        "attempt": 0,
        "reason": "",
        "times": {step: 0.0} if times is None else times,
    }
    return Move(path=path, source=source, target=target, step=step, **{**known, **more})


def job(number: int, spec: JobSpec | None = None, **more: Any) -> SnapshotJob:
    """A job as the policy sees it: an hour old, without GPUs, never measured."""
    known = {
        **dict(name=f"job{number}", user="ada", account="lab", partition="main"),
        **dict(spec=spec or JobSpec(), submitted_at=0.0, age=3600.0),
    }
    return SnapshotJob(number, **{**known, **more})


def running(
    number: int, on: Iterable[str], per_node: int, spec: JobSpec | None = None, **more: Any
) -> SnapshotJob:
    return job(number, spec, **{"placement": Placement(tuple(on), per_node), "started": True, **more})


def plan(jobs: Iterable[SnapshotJob], places: Mapping[int, Placement]) -> Plan:
    """A plan that gives each job its place, by job id; without one, no GPUs."""
    wanted = [(job, places.get(job.job_id, NO_PLACEMENT)) for job in jobs]
    made = (Allocation(job.job_id, at, 1.0, 1.0, 32, at != job.placement, "") for job, at in wanted)
    return Plan(tuple(made), 1.0, 1.0, "none")


def snapshot(nodes: Iterable[Node], jobs: Iterable[SnapshotJob], **settings: Any) -> Snapshot:
    chosen = PolicySettings(**{"objective": "fair-share", **settings})
    return Snapshot("test", 1e9, tuple(nodes), tuple(jobs), chosen)
