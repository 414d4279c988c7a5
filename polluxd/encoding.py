"""A snapshot as JSON and back, exactly: the record from which a decision can be replayed bit for bit.

Floats survive because JSON text carries their shortest exact form; the infinities, which JSON lacks, travel as strings.
"""

from __future__ import annotations

import math
from dataclasses import fields, is_dataclass
from typing import Any

from pollux.goodput import BatchLimits, NoiseScale, ThroughputParams
from polluxd.model import Job, JobSpec, Node, Placement, Report, Settings, Snapshot


def encode(value: Any) -> Any:
    """`value` in terms of what JSON knows; frozen dataclasses and named tuples become objects."""
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: encode(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {k: encode(v) for k, v in value._asdict().items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, frozenset):
        return sorted(encode(v) for v in value)
    if isinstance(value, list | tuple):
        return [encode(v) for v in value]
    return value


def decode_snapshot(data: dict[str, Any]) -> Snapshot:
    """The snapshot that `encode` wrote. Raises KeyError or TypeError on anything else."""
    settings = dict(data["settings"])
    settings["power"] = float(settings["power"])
    return Snapshot(
        cluster=data["cluster"],
        taken_at=float(data["taken_at"]),
        nodes=tuple(Node(**{**n, "partitions": frozenset(n["partitions"])}) for n in data["nodes"]),
        jobs=tuple(_job(j) for j in data["jobs"]),
        settings=Settings(**settings),
    )


def _job(data: dict[str, Any]) -> Job:
    report = data["report"]
    return Job(
        **{
            **data,
            "spec": JobSpec(**data["spec"]),
            "placement": _placement(data["placement"]),
            "report": None if report is None else _report(report),
        }
    )


def _placement(data: dict[str, Any]) -> Placement:
    return Placement(tuple(data["nodes"]), data["gpus_per_node"])


def _report(data: dict[str, Any]) -> Report:
    return Report(
        **{
            **data,
            "limits": BatchLimits(**data["limits"]),
            "params": None if data["params"] is None else ThroughputParams(**data["params"]),
            "noise": None if data["noise"] is None else NoiseScale(**data["noise"]),
        }
    )
