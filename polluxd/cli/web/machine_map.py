"""GPUs by node, coloured by job, and what each account and user holds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..report.columns import SHARE_COLUMNS
from ..report.drawings import job_colours

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """GPUs of one node that one job holds, or that are free."""

    gpus: int
    colour: str
    label: str
    job_id: int | None = None
    """None: no Pollux job that the viewer may see."""
    full: bool = False
    """The viewer may open the job's page."""
    moving: bool = False


@dataclass(frozen=True, slots=True)
class NodeOfMap:
    """One node of the map."""

    name: str
    type: str
    runs: Sequence[Run]
    up: bool


def nodes(found: Iterable[Row], jobs: Iterable[Row], *, hidden: bool) -> list[NodeOfMap]:
    """Return the nodes with the runs of their GPUs.

    Args:
        hidden: there may be jobs of others that the viewer may not see.
    """
    held = defaultdict[str, list[Run]](list)
    for row in jobs:
        names = [name for name in (row["nodes"] or "").split(",") if name]
        for place, name in enumerate(names):
            gpus = row["gpus"] // len(names) + (place < row["gpus"] % len(names))
            held[name].append(_run(row, gpus))
    return [_node(node, held[node["name"]], hidden) for node in found if node["gpus"]]


def _run(row: Row, gpus: int) -> Run:
    moving = bool(row["moving"])
    label = f"job {row['job_id']} {row['name']} of {row['user']}: {row['gpus']} GPUs" + ", moving" * moving
    return Run(gpus, row["colour"], label, row["job_id"], may_open(row), moving)


def coloured(jobs: Iterable[Row]) -> list[Row]:
    """Return the rows with their colours, the jobs that hold GPUs first."""
    rows = sorted(jobs, key=lambda row: (not row["gpus"], row["job_id"]))
    colours = job_colours(row["job_id"] for row in rows)
    return [{**row, "colour": colours[row["job_id"]]} for row in rows]


def may_open(row: Row) -> bool:
    """Whether the row tells all of the job, and not what squeue shows of others' alone."""
    return row["moves"] is not None


def _node(node: Row, runs: Sequence[Run], hidden: bool) -> NodeOfMap:
    plain = min(node["plain"], node["gpus"])
    free = max(node["gpus"] - plain - sum(run.gpus for run in runs), 0)
    rest = [Run(plain, "plain", "plain Slurm jobs")] if plain else []
    if free:
        rest.append(Run(free, "free", "no job that you may see" if hidden else "idle"))
    return NodeOfMap(node["name"], node["type"], [*runs, *rest], node["up"])


def owners(jobs: Sequence[Row], overview: Mapping[str, Any]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return what each account and user holds now, and got in the period where that is known."""
    return [
        (title, _shares(jobs, title, {share["name"]: share for share in overview.get(f"{title}s", ())}))
        for title in ("account", "user")
    ]


def _shares(jobs: Sequence[Row], title: str, past: Mapping[str, Row]) -> list[dict[str, Any]]:
    now = defaultdict[str, list[Row]](list)
    for row in jobs:
        now[row[title]].append(row)
    rows = [
        {
            **dict.fromkeys(column.key for column in SHARE_COLUMNS),
            **past.get(name, {}),
            "name": name,
            "running": sum(bool(row["gpus"]) for row in now[name]),
            "waiting": sum(row["state"] == "PENDING" for row in now[name]),
            "gpus": sum(row["gpus"] or 0 for row in now[name]),
        }
        for name in {*now, *past}
    ]
    return sorted(rows, key=lambda row: (-(row["gpu_seconds"] or 0.0), -row["gpus"], row["name"]))[:50]
