"""All that `polluxctl explain JOB` tells, as one document."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import mode
from typing import Any

from pollux.goodput import Goodput
from polluxd.config.setting_info import policy_document
from polluxd.config.settings import PolicySettings
from polluxd.model import Report
from polluxd.store import JobExplanation, Store

from .forecast import foretold
from .output import Column, count, number
from .story import story
from .table_rows import job_row, move_rows

SIZE_COLUMNS = (
    Column("gpus", "GPUS", right=True),
    Column("nodes", "NODES", right=True),
    Column("goodput", "FITTED GOODPUT", number(3), right=True),
    Column("relative", "AGAINST NOW", lambda v: "-" if v is None else f"{v:.2f}x", right=True),
    Column("batch_size", "BATCH", right=True),
    Column("note", "NOTE", flexible=True, rank=1),
)


def explained(
    store: Store, found: JobExplanation, defaults: PolicySettings, *, to_owner: bool
) -> dict[str, Any]:
    """Return what `explain` prints.

    Args:
        to_owner: leave out the settings, and the speedups of other users' jobs.
    """
    moves = move_rows(store, found.job.job_id)
    row = job_row(found.job, sum(m["total_s"] or 0.0 for m in moves), time.time())
    settings = policy_document(store.settings(defaults))
    snapshot: Mapping[str, Any] = (found.cycle and store.cycle_snapshot(found.cycle.id)) or {}
    others = store.allocations(found.cycle.id) if found.cycle and not to_owner else []
    fit_type, nodes = _nodes_of_fit(snapshot, found.report)
    first, *rest = story(row, found, settings, others)
    ahead = "" if found.job.ended_at else foretold.sentence(store.forecasts(), found.job.job_id, time.time())
    return {
        "job": row,
        "decision": _decision(found),
        "sizes": _sizes(found, nodes),
        "sizes_of": fit_type,
        "moves": moves,
        "settings": {"paused": settings["paused"]} if to_owner else settings,
        "story": [first, *([ahead] if ahead else []), *rest],
    }


def _nodes_of_fit(snapshot: Mapping[str, Any], report: Report | None) -> tuple[str, list[int]]:
    """Return the GPU type of the job's fit, empty in a cluster of one type, and the GPUs of each node of that type."""
    gpus_of = [
        (node.get("gpu_type", ""), int(node["gpus"])) for node in snapshot.get("nodes", ()) if node["gpus"]
    ]
    types = {kind for kind, _ in gpus_of}
    own = report.gpu_type if report is not None and len(types) > 1 and report.gpu_type in types else ""
    return own, [gpus for kind, gpus in gpus_of if own in ("", kind)]


_COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def _shapes(held: tuple[int, int], per_node: int, largest: int) -> list[tuple[int, int]]:
    """Return the sizes to show, as (nodes, GPUs): powers of two within a node, whole nodes, and the job's own size."""
    shapes = {held} if held[1] else set()
    shapes |= {(1, gpus) for gpus in _COUNTS if gpus <= min(per_node, largest)}
    shapes |= {(nodes, nodes * per_node) for nodes in _COUNTS if nodes * per_node <= largest}
    return sorted(shapes, key=lambda shape: (shape[1], shape[0]))


def _sizes(found: JobExplanation, node_sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Predict goodput at other sizes on nodes of so many GPUs, by the job's own fit.

    Sizes go up to the job's limit, and to four times the size at which it was measured. The list is empty until the
    job has reported a fit. Several nodes count as one rack. For a job measured over racks, `over_racks` has the
    goodput there, and the present size counts as it is.
    """
    report, spec = found.report, found.job.spec
    if report is None or report.params is None or found.job.ended_at is not None:
        return []
    present = max(report.nodes, 1)
    node_sizes = node_sizes or [max(report.gpus // present, 1)] * present
    per_node, cluster_gpus = mode(node_sizes), sum(node_sizes)
    known = max(report.explored_gpus, report.prior_gpus)
    largest = min(spec.max_gpus or cluster_gpus, cluster_gpus, 4 * max(known, report.gpus, 1))
    shapes = _shapes((report.nodes, report.gpus), per_node, largest)
    model = Goodput(report.params, report.noise, report.limits, adaptive=spec.adaptive)
    nodes_of, gpus_of = [n for n, _ in shapes], [k for _, k in shapes]
    best, apart = (model.optimize(nodes_of, gpus_of, racks) for racks in (1, 2))
    racked = report.params.alpha_rack is not None
    seen = apart.goodput if racked and _over_racks(found) else best.goodput
    now = next((float(g) for s, g in zip(shapes, seen, strict=True) if s == (report.nodes, report.gpus)), 0.0)
    rows = []
    for (nodes, gpus), goodput, afar, batch in zip(
        shapes, best.goodput, apart.goodput, best.batch_size, strict=True
    ):
        note = _note(report, nodes, gpus, fits=goodput > 0)
        over = float(afar) if racked and nodes > 1 and afar > 0 else None
        if over is not None:
            note = f"{note}{'; ' if note else ''}{number(3)(over)} over several racks"
        rows.append(
            {
                "gpus": gpus,
                "nodes": nodes,
                "goodput": float(goodput) or None,
                "relative": float(goodput) / now if now > 0 and goodput > 0 else None,
                "batch_size": int(batch) or None,
                "over_racks": over,
                "note": note,
            }
        )
    return rows


def _note(report: Report, nodes: int, gpus: int, *, fits: bool) -> str:
    """Say what the prediction for a size rests on."""
    if (nodes, gpus) == (report.nodes, report.gpus):
        return "now"
    if not fits:
        return "no batch size fits"
    if report.explored_gpus < gpus <= report.prior_gpus:
        return "as earlier runs measured it"
    measured = count(report.explored_gpus, "GPU")
    return f"a guess: measured up to {measured} only" if gpus > report.explored_gpus else ""


def _over_racks(found: JobExplanation) -> bool:
    """Say whether the job's present nodes lie in several racks."""
    placed, report = found.allocation, found.report
    if placed is None or placed.explanation is None or report is None:
        return False
    here = (len(placed.placement.nodes), placed.placement.gpus) == (report.nodes, report.gpus)
    return here and placed.explanation.racks > 1


def _decision(found: JobExplanation) -> dict[str, Any] | None:
    """Return the newest decision on the job; None before the first."""
    placed, cycle = found.allocation, found.cycle
    if placed is None:
        return None
    measured = found.report is not None and found.report.params is not None
    return {
        **{key: getattr(placed, key) for key in ("goodput", "speedup", "batch_size", "changed", "reason")},
        **({} if measured else {"goodput": None, "speedup": None}),
        "cycle": cycle.id if cycle else None,
        "at": cycle.started_at if cycle else None,
        "mode": cycle.mode if cycle else None,
        "placement": str(placed.placement),
        "gpus": placed.placement.gpus,
        "explanation": asdict(placed.explanation) if placed.explanation else None,
    }
