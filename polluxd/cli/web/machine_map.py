"""GPUs by node, coloured by job, and what each account and user holds. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..report.drawings import job_colours

Row = Mapping[str, Any]


def nodes(found: Iterable[Row], jobs: Iterable[Row], *, hidden: bool) -> list[Row]:
    """Return the nodes with the runs of their GPUs: what one job holds, plain jobs, and what is free.

    Args:
        hidden: there may be jobs of others that the viewer may not see.
    """
    held = defaultdict[str, list[Row]](list)
    for row in jobs:
        names = [name for name in (row["nodes"] or "").split(",") if name]
        moving = ", moving" if row["moving"] else ""
        label = f"job {row['job_id']} {row['name']} of {row['user']}: {row['gpus']} GPUs{moving}"
        for place, name in enumerate(names):
            gpus = row["gpus"] // len(names) + (place < row["gpus"] % len(names))
            # Without moves the row tells what squeue shows of others' jobs, and there is no page of the job.
            run = {"gpus": gpus, "label": label, "open": row["moves"] is not None}
            held[name].append(run | {key: row[key] for key in ("colour", "job_id", "moving")})
    return [{**node, "runs": _runs(node, held[node["name"]], hidden)} for node in found if node["gpus"]]


def _runs(node: Row, held: Sequence[Row], hidden: bool) -> list[Row]:
    plain = min(node["plain"], node["gpus"])
    free = max(node["gpus"] - plain - sum(run["gpus"] for run in held), 0)
    rest = (
        (plain, "plain", "plain Slurm jobs"),
        (free, "free", "no job that you may see" if hidden else "idle"),
    )
    return [
        *held,
        *(
            {"gpus": gpus, "colour": colour, "label": label, "open": False, "moving": None}
            for gpus, colour, label in rest
            if gpus
        ),
    ]


def coloured(jobs: Iterable[Row]) -> list[Row]:
    """Return the rows with their colours, the jobs that hold GPUs first."""
    rows = sorted(jobs, key=lambda row: (not row["gpus"], row["job_id"]))
    colours = job_colours(row["job_id"] for row in rows)
    return [{**row, "colour": colours[row["job_id"]]} for row in rows]


def owners(jobs: Sequence[Row]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Return what each account and user holds now."""
    return [(title, _shares(jobs, title)) for title in ("account", "user")]


def _shares(jobs: Sequence[Row], title: str) -> list[dict[str, Any]]:
    now = defaultdict[str, list[Row]](list)
    for row in jobs:
        now[row[title]].append(row)
    rows = [
        {
            "name": name,
            "running": sum(bool(row["gpus"]) for row in own),
            "waiting": sum(row["state"] == "PENDING" for row in own),
            "gpus": sum(row["gpus"] or 0 for row in own),
        }
        for name, own in now.items()
    ]
    return sorted(rows, key=lambda row: (-row["gpus"], row["name"]))[:50]
