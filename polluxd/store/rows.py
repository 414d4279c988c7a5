"""Conversion between database rows and the model."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime
from operator import attrgetter
from typing import Any, TypeVar

from pollux.parameters import NoiseScale, ThroughputParams
from polluxd.config.setting_info import as_json, checked, infos
from polluxd.config.settings import PolicySettings
from polluxd.errors import ConfigError, ReportError, StoreRejected
from polluxd.model import Allocation, Explanation, JobSpec, Move, Placement, Report, Spent, Step
from polluxd.model.snapshot_json import decode
from polluxd.slurm.protocol import SlurmJob

from .views import CycleView, EndedJob, HistoryPoint, JobTimes, JobView

log = logging.getLogger(__name__)

Row = Mapping[str, Any]

_T = TypeVar("_T")


def seconds(value: datetime | None) -> float | None:
    """POSIX seconds of a timestamptz."""
    return None if value is None else value.timestamp()


def placement_to_json(placement: Placement) -> str:
    return json.dumps({"nodes": list(placement.nodes), "gpus_per_node": placement.gpus_per_node})


def placement(value: Row) -> Placement:
    return Placement(tuple(value["nodes"]), int(value["gpus_per_node"]))


def finite_or_none(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def job_to_json(job: SlurmJob) -> dict[str, Any]:
    """Encode a job that opted in to Pollux for the queries `upsert_jobs` and `forget_reused_jobs`."""
    spec = job.spec
    assert spec is not None
    running = bool(job.gpus_per_node_held) and not job.state.finished
    return {
        "job_id": job.job_id,
        "uid": job.uid,
        "name": job.name,
        "user_name": job.user,
        "account": job.account,
        "partition": job.partition,
        "spec": {name: getattr(spec, name) for name in JobSpec.__slots__},
        "state": job.state.value,
        "slurm_state": job.raw_state,
        "slurm_reason": job.reason,
        "attempt": job.restart_count,
        "nodes": sorted(job.gpus_per_node_held) if running else [],
        "gpus": sum(job.gpus_per_node_held.values()) if running else 0,
        "submitted_at": job.submit_time,
        # The start time of a pending job is Slurm's guess (or our lease).
        "started_at": job.start_time if running or job.state.finished else None,
        "ended": job.state.finished,
        "ended_at": job.end_time,
        "left_alone": job.left_alone,
    }


def spec(value: Row) -> JobSpec:
    return _made(JobSpec, value)


def report(row: Row) -> Report:
    """The report of a row.

    The gateway has checked each value of its document (`polluxd.gateway.payloads.ReportMessage`), and `decode` gives
    each member the type of its field. A row may come with what polluxd knows beside it: `known_gpus`, `known_nodes`,
    `drained`.

    Raises:
        ReportError: a value is missing or contradicts others: somebody has edited the row.
    """
    document: Mapping[str, Any] = row["report"]
    refused = document.get("resize_refused", {})
    prior = (document.get("prior_gpus", 0), document.get("prior_nodes", 0))
    ours = {
        "attempt": row["attempt"],
        # When it arrived, by the database's clock: nothing is decided by an agent's.
        "at": row["received_at"].timestamp(),
        "first_step_at": document.get("times", {}).get("first_step_at"),
        "prior_gpus": min(prior[0], row.get("known_gpus", prior[0])),
        "prior_nodes": min(prior[1], row.get("known_nodes", prior[1])),
        "checkpointed": document["checkpointed"] or row.get("drained", False),
        "refused": refused.get("id", 0),
        "refused_why": refused.get("why", ""),
    }
    try:
        return decode(Report, {**document, **ours})
    except (StoreRejected, KeyError) as error:
        raise ReportError(f"job {row['job_id']}: {error}") from None


def with_types(report: Report, others: Mapping[str, ThroughputParams]) -> Report:
    """Add the fits for other GPU types to a report; for its own type, its own fit is the newest."""
    if not others:
        return report
    fits = dict(others)
    if report.params is not None:
        fits[report.gpu_type] = report.params
        fits.pop("", None)
    return replace(report, params_by_type=fits)


def fits_by_type(found: Sequence[Row]) -> dict[int, dict[str, ThroughputParams]]:
    """Read fits by job and GPU type from rows of `fits_by_type`."""
    fits: dict[int, dict[str, ThroughputParams]] = {}
    for row in found:
        fits.setdefault(row["job_id"], {})[row["gpu_type"]] = decode(ThroughputParams, row["params"])
    return fits


def _made(kind: type[_T], row: Row, **converted: object) -> _T:
    """Make a value of a row's columns that have its fields' names, and of converted ones."""
    named = (field.name for field in fields(kind))  # type: ignore[arg-type] # a dataclass
    return kind(**{name: row[name] for name in named if name in row} | converted)


def move(row: Row) -> Move:
    return _made(
        Move,
        row,
        source=placement(row["source"]),
        target=placement(row["target"]),
        step=Step(row["step"]),
        times={Step(step): float(at) for step, at in row["times"].items()},
        cancelled_by=row["cancelled_by"] or "",
        ends_at=seconds(row["ends_at"]),
    )


def allocation(row: Row) -> Allocation:
    return _made(
        Allocation,
        row,
        placement=Placement(tuple(row["nodes"]), row["gpus_per_node"]),
        goodput=row["goodput"] or 0.0,
        speedup=row["speedup"] or 0.0,
        explanation=None if row["explanation"] is None else _explained(row["explanation"]),
    )


def _explained(stored: Row) -> Explanation:
    """Read the fields of an explanation that this version knows; a number stored as null was not finite: 0."""
    known = {f.name: stored[f.name] for f in fields(Explanation) if f.name in stored}
    floats = {f.name for f in fields(Explanation) if f.type == "float"}
    values: dict[str, Any] = {k: 0.0 if v is None and k in floats else v for k, v in known.items()}
    return Explanation(**values | {"doubts": tuple(values.get("doubts", ()))})


def allocations_to_json(allocations: Iterable[Allocation]) -> str:
    """Return decisions as JSON; a number that is not finite is null."""
    found = [_allocation(a) for a in allocations]
    try:
        return json.dumps(found, allow_nan=False)
    except ValueError:
        return json.dumps([_finite(a) for a in found])


def _allocation(allocation: Allocation) -> dict[str, Any]:
    placement = allocation.placement
    return {
        "job_id": allocation.job_id,
        "nodes": list(placement.nodes),
        "gpus_per_node": placement.gpus_per_node,
        "gpus": placement.gpus,
        "goodput": float(allocation.goodput),
        "speedup": float(allocation.speedup),
        "batch_size": int(allocation.batch_size),
        "changed": bool(allocation.changed),
        "reason": allocation.reason,
        "explanation": None
        if allocation.explanation is None
        else dict(zip(_EXPLAINED, _explanation(allocation.explanation), strict=True)),
    }


# Not asdict, which copies each value: ten thousand jobs a cycle.
_EXPLAINED = tuple(f.name for f in fields(Explanation))
_explanation = attrgetter(*_EXPLAINED)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(v) for name, v in value.items()}
    return finite_or_none(value) if isinstance(value, float) else value


def cycle(row: Row) -> CycleView:
    return _made(CycleView, row, started_at=row["started_at"].timestamp())


def job_times(row: Row) -> JobTimes:
    return _made(JobTimes, row)


def job_view(row: Row) -> JobView:
    stamps = ("submitted_at", "started_at", "ended_at", "reported_at", "silent_since")
    reported = dict.fromkeys(_REPORTED) | {"checkpointed": False} | (row["report"] or {})
    return _made(
        JobView,
        row,
        user=row["user_name"],
        spec=spec(row["spec"]),
        nodes=tuple(row["nodes"]),
        **{name: reported[name] for name in _REPORTED},
        **{name: seconds(row[name]) for name in stamps},
    )


def ended_job(row: Row) -> EndedJob:
    last = None
    if row["report"] is not None:
        with suppress(ReportError):
            last = report(row)
    times = {name: row[name].timestamp() for name in ("submitted_at", "started_at", "ended_at")}
    return _made(EndedJob, row, user=row["user_name"], spec=spec(row["spec"]), report=last, **times)


_REPORTED = (
    "batch_size",
    "goodput",
    "throughput",
    "progress",
    "target",
    "epoch",
    "checkpointed",
    "mode",
    "advice",
)
"""Members of a report that the list of jobs shows."""


def history_point(row: Row) -> HistoryPoint:
    document = row["report"]
    noise = document.get("noise")
    phi = None if noise is None else NoiseScale(**noise).phi(document["limits"]["initial"])
    keys = {"job_id": row["job_id"], "attempt": row["attempt"], "at": row["received_at"].timestamp()}
    return _made(HistoryPoint, {"target": None, **document, **keys}, noise_scale=finite_or_none(phi))


def spent(found: Sequence[Row]) -> Spent | None:
    """What rented nodes have cost, from a row per account; None without rows."""
    if not found:
        return None
    return Spent({row["account"]: row["month"] for row in found}, max(row["counted_at"] for row in found))


def setting_to_json(name: str, value: object) -> str:
    """Check a setting's value and return it as JSON text. Raises ConfigError."""
    return json.dumps(as_json(checked(name, value)), allow_nan=False)


def settings_from_rows(stored: Mapping[str, Any], defaults: PolicySettings) -> PolicySettings:
    """Return the defaults, overridden by what is stored.

    A name that this version does not know is passed over. A value that is out of range (it can be there only if
    somebody wrote to the table past polluxctl) is logged, and the default is in force.
    """
    values = {}
    for info in infos("policy"):
        if info.key in stored:
            try:
                values[info.key] = checked(info.key, stored[info.key])
            except ConfigError as error:
                log.warning("the database holds an unusable value, the default is in force: %s", error)
    return replace(defaults, **values)
