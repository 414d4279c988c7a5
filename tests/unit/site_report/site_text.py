"""Logs of made-up sites: sacct's text for jobs given as dictionaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from polluxd.site_report.job_log import COLUMNS

T0 = 1_700_000_000 // 3600 * 3600
"""A full hour, in POSIX seconds."""


def sacct_text(jobs: Iterable[Mapping[str, Any]]) -> str:
    """Minutes since T0 in `submit`, `eligible`, `start`, `end`; None: Unknown."""
    return "\n".join(["|".join(COLUMNS), *map(line, jobs)]) + "\n"


def line(job: Mapping[str, Any]) -> str:
    def at(key: str) -> str:
        return "Unknown" if job.get(key) is None else str(T0 + 60 * job[key])

    kind = f"gres/gpu:{job['type']}={job['gpus']}," if job.get("type") else ""
    tres = (
        f"billing=1,cpu=1,{kind}gres/gpu={job['gpus']},mem=1G,node={job.get('nodes', 1)}"
        if job["gpus"]
        else "cpu=1"
    )
    started = job.get("start") is not None
    fields = {
        "JobIDRaw": job["id"],
        "JobID": job.get("shown", job["id"]),
        "Partition": job.get("partition", "a"),
        "Account": job.get("account", "lab"),
        "User": job.get("user", "ann"),
        "State": job.get("state", "COMPLETED"),
        "Submit": at("submit" if "submit" in job else "eligible"),
        "Eligible": at("eligible"),
        "Start": at("start"),
        "End": at("end"),
        "Elapsed": "00:00:00",
        "TimelimitRaw": job.get("limit", ""),
        "NNodes": job.get("nodes", 1),
        "ReqTRES": tres,
        "AllocTRES": tres if started else "",
        "NodeList": ",".join(job.get("places", ())) if started else "None assigned",
        "JobName": job.get("name", "train"),
    }
    return "|".join(str(fields[name]) for name in COLUMNS)


def written(path: Path, jobs: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text(sacct_text(jobs))
    return path
